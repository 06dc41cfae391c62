"""The Tinker API: bodies in, bodies out."""
