"""Compares servers of the Tinker API: `benchmarks/compare.py` drives it, docs/reference/comparison.md explains it."""
