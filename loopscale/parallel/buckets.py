"""How many gradients are added up over replicas at once, by way of a copy."""

BUCKET = 2**26
"""Elements, where ZeRO divides the optimizer's state: 256 MiB keep any network busy, where DeepSpeed's 5e8 would copy all
gradients of a billion parameters."""
UNDIVIDED_BUCKET = 500_000_000
"""Elements, where it does not (ZeRO 0); DeepSpeed has no setting for it."""
