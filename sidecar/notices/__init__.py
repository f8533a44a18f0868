"""Who may announce that this machine is to be left: Kubernetes, and the clouds that it may run in."""
