"""Features of the core: a folder each, registered by the hooks that strangers use. Each can be deleted."""
