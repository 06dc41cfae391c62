"""`tinsmith doctor`: problems of this installation, machine or configuration, and their remedies."""
