"""What plugin authors use: skeletons for a first plugin, and the check of a finished one."""
