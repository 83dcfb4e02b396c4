"""Shared by all contestants' programs. Standard library only, because it runs in each peer's own environment."""
