"""Tests with real processes: results, failures, signals, orphans."""
