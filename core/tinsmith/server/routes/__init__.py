"""The HTTP routes, one module for each router."""
