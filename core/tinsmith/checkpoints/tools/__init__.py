"""What `tinsmith checkpoint` does: reading, checking and rewriting checkpoints without an engine."""
