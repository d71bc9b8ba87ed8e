"""Models of other people's formats into ours, and ours into theirs."""
