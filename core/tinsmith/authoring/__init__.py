"""Tools for plugin authors: skeletons for a first plugin, and the check of a finished one."""
