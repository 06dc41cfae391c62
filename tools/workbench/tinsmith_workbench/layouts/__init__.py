"""Layouts of the megatron backend on so many GPUs: what fits, what it costs, and which is the fastest. No torch."""
