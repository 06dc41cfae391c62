"""The portable checkpoint format and its tools."""
