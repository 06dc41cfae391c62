"""`tinsmith doctor`: what is wrong with this installation, this machine or a configuration, and what to do about it."""
