"""Hostile entries: every extreme in every field of events and dead letters, and job IDs of every kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack

from tampu.wire.ulid import encode_ulid

if TYPE_CHECKING:
    import random

    from spark.filling import Filled

#: 2026-03-01 at noon.
USUAL_MS = 1_772_366_400_000
#: Times: the year 2100, the last one in nanoseconds of 64 bits (2262) and the next, the year 3000, the end of the year
#: 9999 and the next millisecond.
LATE_TIMES = (
    *(4_102_444_800_001, 9_223_372_036_854, 9_223_372_036_855, 32_503_680_000_000, 253_402_300_799_999),
    253_402_300_800_000,
)
#: Extremes of a field: numbers that overflow, times beyond the calendar, text that is not a number, no text.
EXTREMES = (
    *(0, 1, 2**31, *LATE_TIMES, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 10**30, -1, -(2**63)),
    *("", "x", "0x10", " 7", "+7", "007", "\u0663", b"\xff\xfe", b"nul\x00", "x" * 3_000, 'it\'s "a\\b" \U0001f389'),
)
EVENT_FIELDS = (
    *("id", "n", "ts", "attempt", "created_at_ms", "duration_us", "reason", "backoff_ms", "delay_ms", "e"),
    *("worker", "other"),
)
LETTER_FIELDS = ("n", "source_id", "reason", "detail", "error_type", "error", "traceback", "attempts", "worker", "ts")
#: Payloads: values that JSON has, values that it has not, and bytes that are not MessagePack.
PAYLOADS = (
    *(
        msgpack.packb(value)
        for value in (None, True, 2**64 - 1, -(2**63), "\U0001f389\x00", [1, [2]], {"n": {"m": None}})
    ),
    *(msgpack.packb(value) for value in (float("nan"), float("inf"), b"\xff", {1: 2}, {"n": [b""]})),
    *(b"", b"\xc1", b"\x92\x01"),
)
#: Entry IDs that no other can follow, or only each other.
HIGHEST_IDS = (f"{2**63 - 1}-0", f"{2**63 - 1}-{2**63}", f"{2**64 - 1}-{2**64 - 1}")


def tell_extremes(filled: Filled, queue: str = "q", label: str = "") -> int:
    """Write events with every extreme in every field, several per job so that sums overflow; return their number."""
    key, number = filled.keys(queue).events, 0
    usual: dict[str, Any] = {"ts": USUAL_MS, "n": "work", "attempt": 1, "created_at_ms": USUAL_MS, "duration_us": 1}
    usual |= {"reason": "r", "worker": "w"}
    pipe = filled.client.pipeline(transaction=False)
    for field in EVENT_FIELDS:
        for place, value in enumerate(EXTREMES):
            for event in ("active", "failed", "failed", "dlq", "completed"):
                fields = {"e": event, "id": f"{label}{field}-{place}"} | usual | {field: value}
                pipe.execute_command("XADD", key, "*", *(part for pair in fields.items() for part in pair))
                number += 1
    pipe.execute_command("XADD", key, "*", "ts", USUAL_MS, "id", f"{label}no-event")
    pipe.execute_command("XADD", key, "*", "e", "completed", "id", f"{label}twice", "ts", 1, "ts", 2, "e", "failed")
    pipe.execute()
    return number + 2


def tell_highest_ids(filled: Filled, queue: str = "q") -> int:
    """Write events with the highest entry IDs: no other entry can follow them. Return their number."""
    for entry_id in HIGHEST_IDS:
        filled.xadd(filled.keys(queue).events, "e", "drained", "id", "", "ts", USUAL_MS, entry_id=entry_id)
    return len(HIGHEST_IDS)


def extreme_letters(filled: Filled, queue: str = "q", label: str = "") -> int:
    """Write dead letters with every extreme in every field, and in every part of the envelope; return their number."""
    usual: dict[str, Any] = {"n": "work", "source_id": "1-1", "reason": "retries_exhausted", "error_type": "ValueError"}
    usual |= {"error": "no", "attempts": 3, "ts": USUAL_MS}
    pipe = filled.client.pipeline(transaction=False)

    def write(envelope: bytes | None, **fields: Any) -> None:
        given = ({} if envelope is None else {"d": envelope}) | usual | fields
        pipe.execute_command("XADD", filled.keys(queue).dlq, "*", *(part for pair in given.items() for part in pair))

    def envelope(job_id: Any, payload: bytes = b"\x80", created: int = USUAL_MS, attempt: int = 3) -> bytes:
        return msgpack.packb([job_id, payload, created, attempt])

    for field in LETTER_FIELDS:
        for place, value in enumerate(EXTREMES):
            write(envelope(f"{label}{field}-{place}"), **{field: value})
    for place, created in enumerate(value for value in EXTREMES if isinstance(value, int) and 0 <= value < 2**64):
        write(envelope(f"{label}created-{place}", created=created))
    for place, payload in enumerate(PAYLOADS):
        write(envelope(f"{label}payload-{place}", payload))
    write(envelope(f"{label}attempt", attempt=2**32 - 1))
    # An ID that is not UTF-8, or not text, and an empty one; no envelope, and some that are not one.
    for broken in (b"\x94\xa2\xff\xfe\xc4\x01\x80\x01\x01", envelope(7), envelope(""), None, b"", b"\xff", b"\x94"):
        write(broken)
    count = len(pipe.command_stack)
    pipe.execute()
    return count


def job_id_of(kind: int, number: int, created_ms: int, queue: str, rng: random.Random) -> bytes:
    """Return a job ID of one of 20 kinds; half of them are ULIDs of the time of creation."""
    ulid = encode_ulid(created_ms, rng.randbytes(16))
    others = {
        10: f"order-{queue}-{number}",
        11: ulid.lower(),
        12: encode_ulid(0, rng.randbytes(16)),  # as `dedupe=jobid` makes them
        13: "7" + ulid[1:],  # of a year after 2100
        14: f"{queue}-{number}-" + "long" * rng.choice((10, 500)),
        15: f"a/b%2F../{number}?queue=x&date=y",
        16: f'it\'s "{number}" \\ \n\t\x00 \u00fc\U0001f389',
        17: f"{number}",
        18: f" {ulid}",
    }
    if kind == 19:
        return b"\xff\xfe-%d" % number
    return others.get(kind, ulid).encode()
