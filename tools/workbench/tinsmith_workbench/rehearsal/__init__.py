"""One training step of the fsdp backend as one of many ranks, on tensors without contents: what it takes and sends."""
