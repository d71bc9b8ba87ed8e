"""What a state does as it loops."""
