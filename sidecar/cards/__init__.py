"""Watches the cards that workers run on, and says when one is to be left."""
