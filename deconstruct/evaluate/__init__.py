"""Scores of trained models on public benchmarks: `python -m deconstruct.evaluate`."""
