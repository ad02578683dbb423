"""Unit tests of rankwise.environments."""
