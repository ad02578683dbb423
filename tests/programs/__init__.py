"""Property: a random training program on N ranks gives what a hand-written loop of one process gives."""
