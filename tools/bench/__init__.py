"""Benchmarks against other programs, one JSON object a line: `python -m tools.bench NAME`."""
