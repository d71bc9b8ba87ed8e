"""Runs under SLURM, or as processes of one terminal: how they are started, checked, watched and started again."""
