"""Unit tests of `rankwise.registry`."""
