"""Sidecars with the embedded engine."""

from support.stages import command, http, sidecar, stage, start

__all__ = ["command", "http", "sidecar", "stage", "start"]
