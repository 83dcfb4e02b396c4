"""The wire format: encode values to bytes and back. No I/O; the time and random bytes are passed in as parameters."""

from tampu.wire.dlq import decode_dlq_fields, encode_dlq_fields
from tampu.wire.entry import decode_delayed_member, encode_delayed_member
from tampu.wire.envelope import decode_job, encode_job
from tampu.wire.events import decode_event_fields, encode_event_fields
from tampu.wire.keys import QueueKeys
from tampu.wire.payload import decode_result, encode_result
from tampu.wire.repeat import decode_spec, encode_spec

__all__ = [
    "QueueKeys",
    "decode_delayed_member",
    "decode_dlq_fields",
    "decode_event_fields",
    "decode_job",
    "decode_result",
    "decode_spec",
    "encode_delayed_member",
    "encode_dlq_fields",
    "encode_event_fields",
    "encode_job",
    "encode_result",
    "encode_spec",
]
