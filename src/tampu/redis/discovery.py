"""Finds the address to connect to: as given, embedded, what the sentinels say, or the Cluster node of a key's slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tampu.redis.embedded_lease import EmbeddedLease

if TYPE_CHECKING:
    from tampu.redis.settings import Address, ConnectionSettings


async def locate(settings: ConnectionSettings, routing_key: bytes, lease: EmbeddedLease | None = None) -> Address:
    """Where `routing_key` is served right now; `Unreachable` when nobody can tell.

    An embedded server runs from now on, until its `lease` is released or, without one, until the process ends.
    """
    if settings.kind == "embedded":
        return await (lease or EmbeddedLease(settings.data_dir)).address()
    if settings.kind not in ("sentinel", "cluster"):
        return settings.addresses[0]
    from tampu.redis import topology  # now and not before: redis-py takes longer to import than all of this package

    if settings.kind == "sentinel":
        return await topology.ask_sentinels(settings)
    return await topology.ask_cluster(settings, routing_key)
