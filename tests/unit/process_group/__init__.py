"""Unit tests of `rankwise.process_group`."""
