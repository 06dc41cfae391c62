"""Links by which whoever has them reads the curves of one run, and nothing else."""
