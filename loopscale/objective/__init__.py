"""What is minimised: which exits are supervised, and their cross entropy."""
