"""Losses that clients send as graphs: torch.fx's record of a Python function, as plain data.

`graph.py` reads and checks a graph, `evaluation.py` computes loss and derivative from logprobs. Nothing of a graph is
code: its nodes name operations of a fixed list, `functions.py`, which NumPy computes in float64.
"""
