"""ACL users that are deleted after the test, because servers are shared between tests."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.cluster import Cluster
    from servers.process import Server


def nodes_of(server: Server | Cluster) -> list[Server]:
    """Return the nodes of a Cluster, or the server itself. ACL users are not shared between the nodes."""
    return getattr(server, "nodes", None) or [server]


@contextlib.contextmanager
def acl_user(server: Server | Cluster, name: str, password: str, *rules: str) -> Iterator[None]:
    """Create a user with these rules, by default all: `with acl_user(server, "ada", "pw", "~*", "+@all", "-set"):`."""
    nodes = nodes_of(server)
    for node in nodes:
        node.client().execute_command("ACL", "SETUSER", name, "on", f">{password}", *(rules or ("~*", "+@all")))
    try:
        yield
    finally:
        for node in nodes:
            node.client().execute_command("ACL", "DELUSER", name)
