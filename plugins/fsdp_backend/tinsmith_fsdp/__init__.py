"""The FSDP backend: trains dense models of transformers with PyTorch FSDP2."""
