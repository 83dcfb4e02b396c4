"""Real servers for the tests: found (`binaries`), run (`process`, `cluster`, `sentinel`, `tls`), or said to be missing.

Tests get them through the fixtures of `tests/conftest.py`.
"""
