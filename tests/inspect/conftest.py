"""Fixtures of these tests."""

from api.conftest import queue

__all__ = ["queue"]
