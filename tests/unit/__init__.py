"""Tests of one module each; none starts a process. Mirrors src/rankwise."""
