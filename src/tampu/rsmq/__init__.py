"""RSMQ, the simple message queue on Redis: wire-compatible with the JavaScript `rsmq` 0.12.

    from tampu.rsmq import Rsmq

    async with Rsmq("redis://127.0.0.1:6379") as rsmq:
        await rsmq.create_queue("mail")
        await rsmq.send_message("mail", "hello")
        async with rsmq.receiving("mail") as message:  # deleted when the block succeeds
            print(message.message)

| client | use it |
|---|---|
| `Rsmq` | by default: all callers share one connection |
| `PooledRsmq` | for large messages, which would delay the other callers of a shared connection |
| `RsmqSync` | from synchronous code and threads |

Every operation is one round trip and atomic on the server. `receive_message` with `delete_message`, `receiving` and
`listen` deliver at least once, `pop_message` at most once.
"""

from tampu.rsmq.client import PooledRsmq, Rsmq, RsmqConnection, RsmqConnectionSync, RsmqSync, TypedQueue
from tampu.rsmq.errors import (
    BatchInterrupted,
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
from tampu.rsmq.message import Decoder, Encoder, RsmqMessage
from tampu.rsmq.options import PoolOptions, RsmqOptions
from tampu.rsmq.queues import QueueAttributes

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
