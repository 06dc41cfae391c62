"""The tools of `tinsmith checkpoint`: read, check and rewrite checkpoints without an engine."""
