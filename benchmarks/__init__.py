"""Headroom timed beside what a user would pick instead: `python -m benchmarks`."""
