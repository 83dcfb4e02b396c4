"""The targets: each takes any bytes, and may raise only what its function documents."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tampu.base.units import duration, size
from tampu.cli.errors import UsageError
from tampu.cli.units import instant, parse_duration
from tampu.errors import ConfigError, DecodeError
from tampu.inspect.jobs import decoded_job
from tampu.inspect.views import iso, jsonable, one_line, payload_of
from tampu.redis.settings import parse_url
from tampu.rsmq.errors import RsmqError
from tampu.rsmq.message import decode as decode_message
from tampu.rsmq.message import decode_text
from tampu.rsmq.options import check_duration, check_id, check_maxsize, check_qname
from tampu.rsmq.queues import QueueAttributes
from tampu.wire import (
    decode_delayed_member,
    decode_dlq_fields,
    decode_event_fields,
    decode_job,
    decode_result,
    decode_spec,
    encode_delayed_member,
    encode_job,
    encode_spec,
)
from tampu.wire.codec import EncryptedCodec, QueueCodec, SignedCodec
from tampu.wire.cron.schedule import next_fire
from tampu.wire.dlq import encode_dlq_fields
from tampu.wire.entry import read_job_fields
from tampu.wire.envelope import decode_bin_envelopes
from tampu.wire.payload import wrap_bin
from tampu.wire.retry import RetryConfig, backoff_ms
from tampu.wire.task_codec import Arguments
from tampu.wire.ulid import decode_ulid_time

if TYPE_CHECKING:
    from collections.abc import Callable

#: Their keys differ, so that what one of them sealed the other refuses.
CODECS = (
    QueueCodec(SignedCodec({"a": bytes(32)}), "q"),
    QueueCodec(EncryptedCodec({"b": bytes(32)}), "q"),
)
#: A moment to count from: 2026-11-16.
NOW_MS = 1_794_800_000_000


@dataclass(frozen=True)
class Target:
    """One function under test."""

    run: Callable[[bytes], object]
    #: What it may raise.
    errors: tuple[type[Exception], ...]
    #: Inputs to begin with.
    seeds: tuple[bytes, ...] = ()


def text_of(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def fields_of(data: bytes) -> list[bytes]:
    return data.split(b"|")


def envelope(data: bytes) -> None:
    job = decode_job(data)
    packed = encode_job(job)
    assert encode_job(decode_job(packed)) == packed, "what was read can be written and read again"
    quick = decode_bin_envelopes([data])
    assert quick is None or quick[0].id == job.id
    _ = job.payload


def retry(data: bytes) -> None:
    """The retry override of an envelope, and the wait that follows from it."""
    job = decode_job(b"\x95\xa1a\xc4\x01\xc0\x05" + data)
    backoff = job.retry.backoff if job.retry else None
    wait = backoff_ms(job.attempt + 1, backoff, RetryConfig(), lambda below: below - 1)
    assert 0 <= wait < 2**65


def entry(data: bytes) -> None:
    packed, name = read_job_fields(fields_of(data))
    if packed is not None:
        decode_job(packed, name)


def delayed_member(data: bytes) -> None:
    name, packed = decode_delayed_member(data)
    assert encode_delayed_member(name, packed) == data or not name
    decode_job(packed, name)


def stored_spec(data: bytes) -> None:
    spec = decode_spec(data)
    assert decode_spec(encode_spec(spec)) == spec
    spec.pattern.next_fire_ms(NOW_MS)
    spec.meta(NOW_MS)
    _ = spec.payload


def dead_letter(data: bytes) -> None:
    letter = decode_dlq_fields("1-0", fields_of(data))
    encode_dlq_fields(letter)


def result(data: bytes) -> None:
    jsonable(decode_result(data))


def task(first: str, second: int = 3, *, third: list[float] | None = None) -> None:
    """A task whose arguments are read."""


ARGUMENTS = Arguments(task, "task")


def cron(data: bytes) -> None:
    expression, _, zone = text_of(data).partition("|")
    fire = next_fire(expression, zone or None, NOW_MS)
    assert fire is None or fire > NOW_MS


def rsmq_message(data: bytes) -> None:
    message_id, _, rest = data.partition(b"|")
    body, _, first = rest.partition(b"|")
    message = decode_message([message_id, body, 1, first or b"0"], decode_text)
    _ = message.sent


def rsmq_attributes(data: bytes) -> None:
    values: list[Any] = (fields_of(data) + [None] * 7)[:7]
    QueueAttributes.from_reply([*values, 1, 0, 1], "s")
    QueueAttributes.from_reply([*values, 1, 0, 1], "ms")


def rsmq_arguments(data: bytes) -> None:
    text = text_of(data)
    for check in (check_qname, check_id, check_maxsize, lambda value: check_duration("vt", value)):
        try:
            check(text)
        except RsmqError as error:
            str(error)


def url(data: bytes) -> None:
    settings = parse_url(text_of(data))
    assert " password=" not in repr(settings), "a password is never shown"


def sealed(data: bytes) -> None:
    """A payload that an encrypting, or a signing, worker receives: anything but what it sealed is refused."""
    for codec in CODECS:
        codec.open_slot(data, "task")


def shown_job(data: bytes) -> None:
    """A job as the command line shows it."""
    job = decoded_job(data)
    if job is not None:
        value = payload_of(job, "q", raw=False)
        json.dumps(jsonable(value))
        assert len(one_line(value)) <= 120
        instant(job.created_at_ms)
        iso(job.created_at_ms)


def units(data: bytes) -> None:
    seconds = parse_duration(text_of(data))
    assert seconds >= 0
    duration(seconds * 1000)
    size(min(int(seconds), 2**70) if seconds < 1e300 else None)


TARGETS = {
    "envelope": Target(envelope, (DecodeError,), (b"\x94\xa1a\xc4\x01\x01\x05\x00", b"\x84\xa2id\xa1a\xa7payload\x01")),
    "entry": Target(entry, (DecodeError,), (b"d|\x94\xa1a\xc4\x01\x01\x05\x00|n|mail",)),
    "delayed-member": Target(delayed_member, (DecodeError,), (b"\x04\0\0\0mail\x94\xa1a\xc4\x01\x01\x05\x00",)),
    "stored-spec": Target(
        stored_spec,
        (DecodeError,),
        (
            b"\x98\xa1k\xa1n\x81\xa5Every\xcd\x03\xe8\xc4\x01\x01\xc0\xc0\xc0\xa4Skip",
            b"\x98\xa1k\xa1n\x81\xa4Cron\x92\xab*/5 * * * *\xa3UTC\xc4\x01\x01\x05\xc0\xc0\x81\xa7FireAll\x05",
        ),
    ),
    "dead-letter": Target(dead_letter, (), (b"d|x|n|mail|source_id|1-0|reason|malformed|ts|5|original|\x92\xc4\x01a",)),
    "event": Target(
        lambda data: decode_event_fields(fields_of(data)), (), (b"e|completed|id|a|ts|5|n|mail|attempt|1",)
    ),
    "result": Target(result, (DecodeError,), (b"\x81\xa1k\x92\x01\xc4\x01\xff", b"\xd6\xff\0\0\0\0")),
    "retry": Target(
        retry,
        (DecodeError,),
        (b"\x00\x92\x03\xc0", b"\x01\x92\x05\x95\xa5fixed\x05\xc0\xcb@" + b"\0" * 7 + b"\xc0"),
    ),
    "arguments": Target(lambda data: ARGUMENTS.decode(data), (DecodeError,), (b"\xc4\x09\x81\xa5first\xa1a",)),
    "ulid": Target(lambda data: decode_ulid_time(text_of(data)), (DecodeError,), (b"01M7GA6SF90W0P6H8NHCB3RCZJ",)),
    "cron": Target(
        cron,
        (ConfigError,),
        (b"*/5 0 1-7 1,6 MON-FRI|Europe/Berlin", b"0 0 9 L * ? 2030|+05:30", b"@daily", b"0 0 1W * 5#2"),
    ),
    "rsmq-message": Target(rsmq_message, (RsmqError,), (b"fzbhpqzcmwABCDEFGHIJKLMNOPQRSTUV|body|1794800000000",)),
    "rsmq-attributes": Target(rsmq_attributes, (), (b"30|0|65536|1|2|1794800000|1794800001",)),
    "rsmq-arguments": Target(rsmq_arguments, (), (b"queue-1", b"30", b"fzbhpqzcmwABCDEFGHIJKLMNOPQRSTUV")),
    "url": Target(
        url,
        (ConfigError,),
        (
            b"redis://user:p%40ss@host:6379/1?response_timeout=5",
            b"redis+sentinel://a:1,[::1]:2/master/3",
            b"unix:///tmp/s?db=2",
            b"rediss://h?ssl_check_hostname=no",
        ),
    ),
    "sealed": Target(
        sealed,
        (DecodeError,),
        (*(wrap_bin(codec.seal_payload(b"\x01", "task")) for codec in CODECS), b"\xc4\x06\xc4\x04\xc1TS\x01"),
    ),
    "shown-job": Target(
        shown_job, (), (b"\x94\xa1a\xc4\x04\x81\xa1k\x01\x05\x00", b"\x94\xa1a\xd6\xff\0\0\0\0\x05\x00")
    ),
    "units": Target(units, (UsageError,), (b"1h 30m", b"500ms", b"1.5d")),
}  # fmt: skip
