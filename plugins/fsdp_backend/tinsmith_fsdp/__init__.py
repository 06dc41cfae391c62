"""The FSDP backend: trains models of transformers with PyTorch FSDP2."""
