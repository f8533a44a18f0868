"""Snapshots in stores that are not this node's: who brings them there, and who gives them back."""
