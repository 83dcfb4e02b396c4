"""RSMQ, the simple message queue on Redis: wire-compatible with the JavaScript `rsmq` 0.12.

    from tampu.rsmq import Rsmq

    async with Rsmq("redis://127.0.0.1:6379") as rsmq:
        await rsmq.create_queue("mail")
        await rsmq.send_message("mail", "hello")
        async with rsmq.receiving("mail") as message:  # deleted when the block succeeds
            print(message.message)

| client | use it |
|---|---|
| `Rsmq` | first: one connection that all callers share |
| `PooledRsmq` | for large bodies, behind which others would have to wait |
| `RsmqSync` | without an event loop, and from threads |

Every operation is one round trip and one atomic step on the server. At least once: `receive_message` and
`delete_message`, `receiving`, `listen`. At most once: `pop_message`.
"""

from tampu.rsmq.batches import BatchInterrupted
from tampu.rsmq.client import PooledRsmq, Rsmq
from tampu.rsmq.codec import Decoder, Encoder
from tampu.rsmq.errors import (
    CannotDecodeMessage,
    InvalidFormat,
    InvalidValue,
    MessageNotString,
    MessageTooLong,
    MissingParameter,
    NoAttributeSupplied,
    QueueExists,
    QueueNotFound,
    RsmqError,
)
from tampu.rsmq.message import QueueAttributes, RsmqMessage
from tampu.rsmq.options import PoolOptions, RsmqOptions
from tampu.rsmq.protocols import RsmqConnection, RsmqConnectionSync
from tampu.rsmq.sync import RsmqSync
from tampu.rsmq.typed_queue import TypedQueue

__all__ = [
    "BatchInterrupted",
    "CannotDecodeMessage",
    "Decoder",
    "Encoder",
    "InvalidFormat",
    "InvalidValue",
    "MessageNotString",
    "MessageTooLong",
    "MissingParameter",
    "NoAttributeSupplied",
    "PoolOptions",
    "PooledRsmq",
    "QueueAttributes",
    "QueueExists",
    "QueueNotFound",
    "Rsmq",
    "RsmqConnection",
    "RsmqConnectionSync",
    "RsmqError",
    "RsmqMessage",
    "RsmqOptions",
    "RsmqSync",
    "TypedQueue",
]
