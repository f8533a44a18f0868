"""Load, faults and measurements against a running midstream."""
