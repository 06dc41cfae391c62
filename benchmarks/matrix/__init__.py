"""Tries models on real servers: `benchmarks/model_matrix.py` drives it, docs/reference/models.md shows the results."""
