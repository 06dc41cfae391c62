"""Core's own plugins, registered as a stranger's are, and what they are made of."""
