"""Which devices and how much of their memory each trainer and sampler gets. Starts nothing, loads no framework."""
