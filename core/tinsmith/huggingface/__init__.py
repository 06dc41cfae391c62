"""Hugging Face directories: models, adapters, tokenizers, and tiny random ones for tests."""
