"""Helpers of the tests, and the tests of these helpers."""
