"""The checkpoints that a server keeps: their `tinker://` paths, atomic directories, and imports from elsewhere."""
