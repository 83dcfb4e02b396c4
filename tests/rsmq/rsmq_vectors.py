"""Replay recordings of the JavaScript `rsmq` 0.12.4: put a queue into the state before an operation, and compare the
state after it with the recorded one.

The recordings (`tests/vectors/rsmq_js.json`, `rsmq_js_2.json`) are MONITOR captures without the commands: name, input,
the server's time, the return value or error, notifications, and a dump of all keys afterwards, with values in hex. They
contain the times and ids of the day they were made. A replay moves all times by whole seconds to today. A time that the
operation writes must lie within the operation, and new ids replace the recorded new ones.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).parents[1] / "vectors"

#: Fields of a hash that hold Unix seconds.
SECONDS = ("created", "modified")
#: How far apart two steps of one recording may be, in ms: the replay may do them within one ms.
STEP_MS = 60

State = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Vector:
    name: str
    what: str
    input: dict[str, Any] | None
    #: The server's time during the operation, where it is known.
    at_ms: int | None
    returned: Any
    error: dict[str, str] | None
    published: list[dict[str, str]]
    before: State
    after: State


def load(file: str) -> list[Vector]:
    """Return the recordings of a file. The state before each is the state after its predecessor."""
    vectors: list[Vector] = []
    for record in json.loads((VECTORS / file).read_text()):
        before = vectors[-1].after if vectors else {}
        vectors.append(Vector(before=before, after=record.pop("keys_after"), **record))
    return vectors


def is_time(kind: str, field: str) -> bool:
    return kind == "zset" or field in SECONDS or field.endswith(":fr")


class Replay:
    """One replay on one server. `ns` replaces the recorded namespace."""

    def __init__(self, client: Any, ns: str, at_ms: int | None) -> None:
        self.client = client
        self.ns = ns
        self.now_ms = server_ms(client)
        self.at_ms = self.now_ms if at_ms is None else at_ms
        #: Whole seconds, because hidden messages are counted by whole seconds; not beyond now, because messages that
        #: were visible must be visible in the replay.
        self.shift_ms = (self.now_ms - self.at_ms) // 1000 * 1000

    def key(self, recorded: str) -> str:
        return self.ns + recorded.removeprefix("rsmq")

    def moved(self, kind: str, field: str, value: Any) -> Any:
        """Return a recorded value with its time moved to today."""
        if kind == "zset":
            return value + self.shift_ms
        text = bytes.fromhex(value)
        if not is_time(kind, field):
            return text
        step = self.shift_ms // 1000 if field in SECONDS else self.shift_ms
        return b"%d" % (int(text) + step)

    def put(self, state: State) -> None:
        """Write a recorded state."""
        for recorded, content in state.items():
            ((kind, fields),) = content.items()
            key = self.key(recorded)
            if kind == "set":
                self.client.sadd(key, *fields)
            elif kind == "hash":
                self.client.hset(key, mapping={name: self.moved(kind, name, fields[name]) for name in fields})
            else:
                self.client.zadd(key, {name: self.moved(kind, name, fields[name]) for name in fields})

    def dump(self) -> dict[str, dict[str, Any]]:
        """Return all keys of the server in the form that `put` takes; none may have a TTL."""
        state: dict[str, dict[str, Any]] = {}
        for raw in self.client.scan_iter("*", count=1000):
            key = raw.decode()
            assert self.client.pttl(key) == -1, f"{key} has a TTL"
            kind = self.client.type(key).decode()
            if kind == "set":
                state[key] = {kind: sorted(member.decode() for member in self.client.smembers(key))}
            elif kind == "hash":
                state[key] = {kind: {name.decode(): value for name, value in self.client.hgetall(key).items()}}
            else:
                pairs = self.client.zrange(key, 0, -1, withscores=True)
                state[key] = {kind: {name.decode(): int(score) for name, score in pairs}}
        return state

    def check(self, before: State, after: State, ended_ms: int) -> None:
        """Compare the server with the recorded state after the operation."""
        actual = self.dump()
        ids = self.pair_new_ids(before, after, actual)
        assert set(actual) == {self.key(recorded) for recorded in after}
        for recorded, content in after.items():
            ((kind, fields),) = content.items()
            found = actual[self.key(recorded)]
            assert list(found) == [kind]
            if kind == "set":
                assert found[kind] == fields
                continue
            assert set(found[kind]) == {_renamed(name, ids) for name in fields}
            old = before.get(recorded, {}).get(kind, {})
            for name, value in fields.items():
                seen = found[kind][_renamed(name, ids)]
                if is_time(kind, name) and old.get(name) != value:
                    self.check_new_time(name, value, seen, ended_ms)
                else:
                    assert seen == self.moved(kind, name, value), f"{recorded} {name}"

    def check_new_time(self, name: str, recorded: Any, seen: Any, ended_ms: int) -> None:
        if name in SECONDS:
            assert int(bytes.fromhex(recorded)) == self.at_ms // 1000, "the recording's own time is wrong"
            assert self.now_ms // 1000 <= int(seen) <= ended_ms // 1000
            return
        recorded_ms = recorded if isinstance(recorded, int) else int(bytes.fromhex(recorded))
        ahead = recorded_ms - self.at_ms
        assert self.now_ms + ahead - STEP_MS <= int(seen) <= ended_ms + ahead + STEP_MS, name

    def pair_new_ids(self, before: State, after: State, actual: dict[str, Any]) -> dict[str, str]:
        """Pair the recorded new ids with ours, in the order in which they would be received."""
        pairs: dict[str, str] = {}
        for recorded, content in after.items():
            if "zset" not in content:
                continue
            old = before.get(recorded, {}).get("zset", {})
            theirs = _in_order({name: score for name, score in content["zset"].items() if name not in old})
            found = actual.get(self.key(recorded), {}).get("zset", {})
            ours = _in_order({name: score for name, score in found.items() if name not in old})
            assert len(theirs) == len(ours)
            pairs |= dict(zip(theirs, ours, strict=True))
        return pairs


def server_ms(client: Any) -> int:
    """Return the server's time; on a Cluster that of the first node, since all run on one machine."""
    answer = client.time()
    if isinstance(answer, dict):
        answer = next(iter(answer.values()))
    seconds, microseconds = answer
    return seconds * 1000 + microseconds // 1000


def _in_order(scores: dict[str, int]) -> list[str]:
    return sorted(scores, key=lambda name: (scores[name], name))


def _renamed(name: str, ids: dict[str, str]) -> str:
    message_id, colon, suffix = name.partition(":")
    return ids.get(message_id, message_id) + colon + suffix
