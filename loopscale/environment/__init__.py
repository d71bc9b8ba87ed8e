"""What is installed, which devices and kernels there are, and Megatron on a CPU."""
