"""Tests of `rankwise.trainer.data`."""
