"""Registers, lists and removes the repeatable jobs of a queue. The scheduler fires them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tampu.errors import ConfigError, DecodeError
from tampu.redis import calls
from tampu.wire.entry import score_ms
from tampu.wire.repeat import decode_spec, encode_spec

if TYPE_CHECKING:
    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys
    from tampu.wire.repeat import RepeatableMeta, RepeatableSpec, StoredSpec


class Repeatables:
    """The repeatable jobs of one queue."""

    def __init__(self, client: Client, keys: QueueKeys) -> None:
        self._client = client
        self._keys = keys

    async def upsert(self, spec: StoredSpec, *, keep_identical: bool) -> bool:
        """Write a spec and its first fire. Return False if `keep_identical` left an identical one in place."""
        next_fire_ms = first_fire_ms(spec, await self._client.server_time_ms())
        return await calls.upsert_repeatable(
            self._client,
            *(self._keys.repeat, self._keys.repeat_spec(spec.key)),
            next_ms=next_fire_ms,
            spec_key=spec.key,
            spec=encode_spec(spec),
            keep_identical=keep_identical,
        )

    async def list(self, limit: int) -> list[RepeatableMeta]:
        """Return up to `limit` repeatable jobs, the next to fire first. Unreadable ones are left out."""
        if limit <= 0:
            return []
        flat = await self._client.call("ZRANGE", self._keys.repeat, 0, limit - 1, "WITHSCORES")
        due = dict(zip(flat[::2], flat[1::2], strict=True))
        spec_keys = [self._keys.repeat_spec(key.decode(errors="surrogateescape")) for key in due]
        specs = await self._client.call_many(
            [("HGET", spec_key.encode(errors="surrogateescape"), "spec") for spec_key in spec_keys]
        )
        metas = []
        for score, packed in zip(due.values(), specs, strict=True):
            try:
                metas.append(decode_spec(packed or b"").meta(score_ms(score)))
            except DecodeError:
                continue
        return metas

    async def remove(self, spec_key: str) -> bool:
        """Remove a repeatable job. Return False if there is none with this key."""
        keys = (self._keys.repeat, self._keys.repeat_spec(spec_key))
        return await calls.remove_repeatable(self._client, *keys, spec_key=spec_key)


def first_fire_ms(spec: StoredSpec | RepeatableSpec[Any], now_ms: int) -> int:
    """Return the first fire of a spec registered now, in epoch milliseconds. Raises `ConfigError` if it never fires."""
    first = spec.pattern.next_fire_ms(max(now_ms, spec.start_after_ms or 0))
    if first is None:
        raise ConfigError(f"pattern {spec.pattern.signature()!r} never fires again: it has no time in the future")
    if spec.end_before_ms is not None and first > spec.end_before_ms:
        raise ConfigError(f"end_before_ms must not be before the first fire ({first}); got {spec.end_before_ms}")
    return first
