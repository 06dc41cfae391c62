"""The portable checkpoint format, and the tools that work on it."""
