"""Reads the gate of a limited queue: its numbers, and why a job waits. See `redis/lua/lib/gate.lua`."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from tampu.wire.limits import KEY_PREFIX, TASK_PREFIX, Limit, decode_limits

if TYPE_CHECKING:
    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys
    from tampu.wire.limits import Limits

_STATE = struct.Struct("<4dI")


class GateView(NamedTuple):
    """The numbers of a limited queue."""

    #: Jobs that run, by the gate's count.
    running: int
    #: Jobs that wait and are indexed.
    waiting: int
    #: Keys that take turns now; keys and tasks that wait for their rate or rest; keys whose task is at its limit.
    in_turn: int
    cooling: int
    parked: int


class _State(NamedTuple):
    running: int = 0
    tat_ms: float = 0.0
    rest_ms: float = 0.0
    #: The ordered job for which the key waits.
    hold: str = ""


async def read_gate(client: Client, keys: QueueKeys) -> GateView:
    """Return the numbers of a limited queue."""
    _, _, line, turn, cool, parked, slots, _, _ = keys.gate
    commands = [("HLEN", slots), *(("ZCARD", key) for key in (line, turn, cool, parked))]
    return GateView(*await client.call_many(commands))


async def why_held(client: Client, keys: QueueKeys, *, key: str | None, task: str) -> list[str]:
    """Return why a waiting job of a limited queue does not run; nothing if the queue has no limits."""
    limits = decode_limits(await client.call("HGETALL", keys.limits))
    name = task if key is None else key
    fields = (KEY_PREFIX + name, TASK_PREFIX + task)
    view = await read_gate(client, keys)
    values = await client.call("HMGET", keys.gate[1], "t", *fields)
    now_ms = await client.server_time_ms()
    of_key, of_task = (_read_state(value) for value in values[1:])
    of_queue = _State(view.running, float(values[0] or 0))
    whose = f"key {name!r}"
    reasons = [
        *_reasons("the queue", limits.queue, of_queue, now_ms),
        *_reasons(f"task {task!r}", limits.tasks.get(task, Limit()), of_task, now_ms),
        *_reasons(whose, limit_of_key(limits, name), of_key, now_ms),
    ]
    if of_key.rest_ms > now_ms:
        reasons.append(f"{whose} rests for another {(of_key.rest_ms - now_ms) / 1000:.1f} s (a handler raised Hold)")
    if of_key.hold:
        reasons.append(f"{whose} is ordered: job {of_key.hold} goes first")
    is_limited = limits.queue.is_set or limits.per_key.is_set or bool(limits.keys or limits.tasks)
    if not reasons and is_limited:
        reasons.append(f"{whose} waits for its turn; keys that take turns now: {view.in_turn}")
    return reasons


def limit_of_key(limits: Limits, key: str) -> Limit:
    """Return the limit that applies to a key: its own, and that of every key for what it does not set."""
    own, general = limits.keys.get(key, Limit()), limits.per_key
    names = ("concurrency", "rate", "burst", "weight", "ordered")
    values = {name: getattr(general if getattr(own, name) is None else own, name) for name in names}
    return Limit(**values)


def _read_state(value: bytes | None) -> _State:
    if value is None or len(value) < _STATE.size:
        return _State()
    running, _, tat_ms, rest_ms, size = _STATE.unpack_from(value)
    return _State(int(running), tat_ms, rest_ms, value[_STATE.size : _STATE.size + size].decode(errors="replace"))


def _reasons(whose: str, limit: Limit, state: _State, now_ms: int) -> list[str]:
    reasons = []
    most = 1 if limit.ordered and limit.concurrency != 0 else limit.concurrency
    if most is not None and state.running >= most:
        reasons.append(f"{whose} is at its limit: {state.running} of {most:g} jobs run")
    interval_ms, burst = limit.interval_ms, limit.burst or 1
    wait_ms = state.tat_ms - (burst - 1) * interval_ms - now_ms
    if interval_ms and wait_ms > 0:
        reasons.append(f"{whose} is at its rate of {limit.rate}: the next job may start in {wait_ms / 1000:.1f} s")
    return reasons
