"""Whole fleets in virtual time: real gateways, nodes, leases and streams over simulated networks, disks and engines."""
