"""The core's own plugins, registered like any others."""
