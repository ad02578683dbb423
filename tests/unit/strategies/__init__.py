"""Unit tests of `rankwise.strategies`."""
