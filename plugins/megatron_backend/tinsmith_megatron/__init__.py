"""The Megatron backend: trains large models, divided by tensors, layers and experts."""
