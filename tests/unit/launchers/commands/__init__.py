"""Unit tests of `rankwise.launchers.commands`."""
