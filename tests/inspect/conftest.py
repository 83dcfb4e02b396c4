"""Fixtures for the tests of `tampu.inspect`."""

from api.conftest import queue

__all__ = ["queue"]
