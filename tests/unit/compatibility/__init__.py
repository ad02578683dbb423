"""Unit tests of rankwise.compatibility."""
