"""Real servers for tests: found (`binaries`), run (`process`, `cluster`, `sentinel`, `tls`), or reported as missing.

Tests get them through the fixtures of `tests/conftest.py`.
"""
