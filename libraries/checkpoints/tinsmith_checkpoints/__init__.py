"""Files of models and checkpoints: the portable format, Hugging Face directories, and tools for both. No ML framework.

The server stands on this package, which knows nothing of it. Its names for plugins are in
`tinsmith_checkpoints.huggingface`.
"""
