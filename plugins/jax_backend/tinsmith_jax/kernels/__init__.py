"""Kernels for accelerators, in Pallas, and the choice among them."""
