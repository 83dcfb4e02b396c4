"""ACL users that are deleted after the test, because servers are shared between tests."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.process import Server


@contextlib.contextmanager
def acl_user(server: Server, name: str, password: str, *rules: str) -> Iterator[None]:
    """Create a user with these rules, by default all: `with acl_user(server, "ada", "pw", "~*", "+@all", "-set"):`."""
    server.client().execute_command("ACL", "SETUSER", name, "on", f">{password}", *(rules or ("~*", "+@all")))
    try:
        yield
    finally:
        server.client().execute_command("ACL", "DELUSER", name)
