"""Engines behind one contract; each sub-package holds one engine."""
