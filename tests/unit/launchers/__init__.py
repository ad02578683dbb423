"""Unit tests of `rankwise.launchers`."""
