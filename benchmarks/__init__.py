"""Benchmarks that compare rankwise with raw torch and its peers; `python -m benchmarks` runs all of them."""
