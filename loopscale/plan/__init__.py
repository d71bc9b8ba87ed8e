"""Memory and work of a configuration on a cluster, before it is paid for."""
