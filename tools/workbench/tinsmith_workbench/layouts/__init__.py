"""Layouts of the megatron backend on a number of GPUs: which fit, their cost, and the fastest. No torch."""
