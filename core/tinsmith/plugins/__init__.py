"""Finding plugins, checking them, and keeping the broken ones apart."""
