"""Damaged and random inputs for everything that is parsed from outside."""
