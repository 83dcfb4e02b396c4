"""The repeatable jobs of a queue: register, list, remove. Firing them is the scheduler's work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tampu.errors import ConfigError, DecodeError
from tampu.redis import calls
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
        """Write a spec and its first fire; whether anything was written."""
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
        """Up to `limit` repeatables, the next to fire first. What cannot be read is left out."""
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
                metas.append(decode_spec(packed or b"").meta(int(float(score))))
            except DecodeError:
                continue
        return metas

    async def remove(self, spec_key: str) -> bool:
        """Remove a repeatable; whether it was there."""
        keys = (self._keys.repeat, self._keys.repeat_spec(spec_key))
        return await calls.remove_repeatable(self._client, *keys, spec_key=spec_key)


def first_fire_ms(spec: StoredSpec | RepeatableSpec[Any], now_ms: int) -> int:
    """When a spec registered now fires first; `ConfigError` when it never would."""
    first = spec.pattern.next_fire_ms(max(now_ms, spec.start_after_ms or 0))
    if first is None:
        raise ConfigError(f"pattern {spec.pattern.signature()!r} never fires again")
    if spec.end_before_ms is not None and first > spec.end_before_ms:
        raise ConfigError(f"end_before_ms {spec.end_before_ms} is before the first fire, {first}")
    return first
