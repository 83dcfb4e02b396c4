"""Hypothesis strategies for the codecs: values that must survive a round trip, and bytes that no writer produces."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tampu.base.checks import MAX_U32, MAX_U64
from tampu.wire.dlq import DlqEntry, DlqReason
from tampu.wire.events import INTEGER_FIELDS
from tampu.wire.job import Job
from tampu.wire.repeat import MissedFiresPolicy, RepeatPattern, StoredSpec
from tampu.wire.retry import BackoffKind, BackoffSpec, JobRetryOverride

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")

#: TAMPU_EXAMPLES=5000 runs that many random examples instead of a few fixed ones.
_ASKED_FOR = os.environ.get("TAMPU_EXAMPLES")


def examples(count: int) -> Callable[[F], F]:
    """Return a decorator that sets the number of examples of a property."""
    return settings(
        max_examples=int(_ASKED_FOR or count),
        derandomize=_ASKED_FOR is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


u32 = st.integers(0, MAX_U32) | st.integers(0, 300)
u64 = st.integers(0, MAX_U64) | st.integers(0, 70_000)
i64_or_u64 = st.integers(-(2**63), MAX_U64) | st.integers(-200, 300)

ids = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=60).filter(str.strip)
names = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=60)

scalars = (
    st.none()
    | st.booleans()
    | i64_or_u64
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=40)
    | st.datetimes(min_value=datetime(1, 1, 2), max_value=datetime(9999, 12, 30), timezones=st.just(UTC))
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=10) | i64_or_u64 | st.binary(max_size=6), inner, max_size=5)
    ),
    max_leaves=12,
)

multipliers = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
backoffs = st.builds(
    BackoffSpec,
    st.sampled_from([BackoffKind.FIXED, BackoffKind.EXPONENTIAL]),
    u64,
    st.none() | u64,
    st.none() | multipliers,
    st.none() | u64,
)
retries = st.builds(JobRetryOverride, st.none() | u32, st.none() | backoffs)


@st.composite
def jobs(draw: st.DrawFn) -> Job[Any]:
    payload_format = draw(st.sampled_from(["bin", "inline"]))
    payload = draw(values.filter(lambda value: payload_format == "bin" or not isinstance(value, bytes)))
    return Job(
        draw(ids),
        draw(names),
        payload,
        draw(u32),
        draw(u64),
        retry=draw(st.none() | retries),
        payload_format=payload_format,
    )


patterns = st.builds(RepeatPattern.every, st.integers(1, MAX_U64)) | st.builds(
    lambda expression, tz: RepeatPattern.cron(expression, tz=tz),
    st.sampled_from(["* * * * *", "*/5 0 1 1 *", "30 0 9 * * MON-FRI", "0 0 0 1 1 * 2030", "@daily"]),
    st.sampled_from([None, "", "Z", "UTC", "+05:30", "-0800", "America/New_York"]),
)
policies = st.sampled_from([MissedFiresPolicy.skip(), MissedFiresPolicy.fire_once()]) | st.builds(
    MissedFiresPolicy.fire_all, st.integers(1, MAX_U32)
)


@st.composite
def specs(draw: st.DrawFn) -> StoredSpec:
    return StoredSpec(
        key=draw(names),
        job_name=draw(names),
        pattern=draw(patterns),
        payload_slot=draw(jobs()).payload_slot,
        limit=draw(st.none() | u64),
        start_after_ms=draw(st.none() | u64),
        end_before_ms=draw(st.none() | u64),
        missed_fires=draw(policies),
    )


optional_texts = st.none() | st.text(max_size=40)
dead_letters = st.builds(
    DlqEntry,
    dlq_id=st.just("1-0"),
    source_id=st.text(max_size=20),
    reason=st.sampled_from([reason.value for reason in DlqReason]),
    detail=optional_texts,
    payload=st.binary(max_size=60),
    name=names,
    error_type=optional_texts,
    error=optional_texts,
    traceback=optional_texts,
    attempts=st.none() | u32,
    worker=optional_texts,
    failed_at_ms=st.none() | u64,
    original=st.none() | st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=9)), max_size=4).map(tuple),
)

#: Extra fields of events: those that are numbers, and texts under any other name.
event_extras = st.dictionaries(
    st.sampled_from(sorted(INTEGER_FIELDS - {"ts"})), st.integers(0, MAX_U64), max_size=3
) | st.dictionaries(
    st.text(max_size=8).filter(lambda key: key not in {"e", "id", "n"} | INTEGER_FIELDS),
    st.text(max_size=30),
    max_size=3,
)


# --- bytes that no writer produces ------------------------------------------------------------------------------------


def _sized(lead: int, width: int) -> Callable[[bytes], bytes]:
    return lambda body: bytes([lead]) + len(body).to_bytes(width, "big") + body


def _wide_int(lead_and_width: tuple[int, int]) -> st.SearchStrategy[bytes]:
    lead, width = lead_and_width
    return st.binary(min_size=width, max_size=width).map(lambda body: bytes([lead]) + body)


_atoms = (
    st.sampled_from([b"\xc0", b"\xc2", b"\xc3", b"\xc1", b"\x00", b"\x7f", b"\xe0", b"\xff"])
    | st.sampled_from([(0xCA, 4), (0xCB, 8), (0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8), (0xD0, 1), (0xD3, 8)]).flatmap(
        _wide_int
    )
    | st.sampled_from([(0xD4, 2), (0xD5, 3), (0xD6, 5), (0xD7, 9), (0xD8, 17)]).flatmap(_wide_int)
    | st.sampled_from([_sized(0xC4, 1), _sized(0xC5, 2), _sized(0xC6, 4), _sized(0xD9, 1), _sized(0xDB, 4)]).flatmap(
        lambda wrap: st.binary(max_size=8).map(wrap)
    )
    | st.sampled_from(
        ["id", "payload", "created_at_ms", "attempt", "retry", "backoff", "kind", "fixed", "pattern", "Every", "Skip"]
    ).map(lambda text: bytes([0xA0 + len(text)]) + text.encode())
)


def _containers(inner: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    children = st.lists(inner, max_size=9)
    return (
        children.map(lambda slots: bytes([0x90 + len(slots)]) + b"".join(slots))
        | children.map(lambda slots: b"\xdd" + len(slots).to_bytes(4, "big") + b"".join(slots))
        | children.map(lambda slots: bytes([0x80 + len(slots) // 2]) + b"".join(slots[: len(slots) // 2 * 2]))
        # The header claims too few or too many values.
        | st.tuples(
            st.sampled_from([b"\x95", b"\x85", b"\xdc\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91"]), children
        ).map(lambda pair: pair[0] + b"".join(pair[1]))
    )


#: MessagePack that is well-formed in most places, with keys of any type, ext types, wide forms and false claims.
odd_messagepack = st.recursive(_atoms, _containers, max_leaves=15)


@st.composite
def damaged(draw: st.DrawFn, sound: st.SearchStrategy[bytes]) -> bytes:
    """Draw valid bytes with a few of them changed, removed, doubled or cut off."""
    data = bytearray(draw(sound))
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["set", "insert", "delete", "cut", "repeat"]))
        if kind == "set" and position < len(data):
            data[position] = draw(st.integers(0, 255))
        elif kind == "insert":
            data[position:position] = draw(st.binary(min_size=1, max_size=3) | odd_messagepack)
        elif kind == "delete":
            del data[position : position + draw(st.integers(1, 4))]
        elif kind == "cut":
            del data[position:]
        elif kind == "repeat":
            data[position:position] = data[position : position + 8]
    return bytes(data)
