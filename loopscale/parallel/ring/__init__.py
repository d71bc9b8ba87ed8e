"""The ring: a pure plan of operations per stage, and the executor that runs it."""
