"""Recovery of single queues: creates missing groups, and retries queues that cannot be read.

A queue whose key has the wrong type, whose group is gone or that an ACL denies is left out, so that others can be read.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from tampu.errors import RedisError
from tampu.redis.faults import ConnectionLost, ServerError, Unreachable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.config import ConsumerConfig
    from tampu.consume.served_queue import ServedQueue
    from tampu.consume.shares import Share, Turns
    from tampu.redis.client import Client

logger = logging.getLogger("tampu.worker")


class Recovery:
    """Keeps track of which queues of a reader can be read."""

    def __init__(self, client: Client, config: ConsumerConfig, queues: Sequence[ServedQueue], turns: Turns) -> None:
        self._client = client
        self._config = config
        #: All queues on the server; queues may be added.
        self._queues = queues
        self._turns = turns
        #: The queues that have had a group, by their share.
        self.by_share: dict[Share, ServedQueue] = {}
        #: True if a queue may be failing or have no group.
        self._has_trouble = False

    @property
    def is_needed(self) -> bool:
        """Return True if a queue was added, or may be failing or have no group."""
        return self._has_trouble or len(self.by_share) != len(self._queues)

    async def make_groups(self) -> bool:
        """Create missing consumer groups, and their streams if necessary. Return True if a group was created."""
        now = time.monotonic()
        queues = [queue for queue in self._queues if queue.group_since is None and queue.retry_at <= now]
        group = self._config.group
        replies = await self._client.call_each(
            [("XGROUP", "CREATE", queue.keys.stream, group, "0", "MKSTREAM") for queue in queues]
        )
        is_new = False
        for queue, reply in zip(queues, replies, strict=True):
            error: RedisError | None = reply if isinstance(reply, RedisError) else None
            if isinstance(error, ServerError) and error.kind == "OOM":
                # Without free memory no group can be created, but existing ones can be drained, which frees memory.
                error = await self._error_of(queue, error)
            if isinstance(error, ConnectionLost | Unreachable):
                raise error
            if isinstance(error, ServerError) and error.kind != "BUSYGROUP":
                self._note_failure(queue, error)
                continue
            queue.group_since = time.monotonic()
            queue.is_failing = False
            self.by_share[queue.share] = queue
            is_new = True
        return is_new

    async def _error_of(self, queue: ServedQueue, error: ServerError) -> ServerError | None:
        """Return None if the group exists, otherwise the error from creating it."""
        (reply,) = await self._client.call_each([("XPENDING", queue.keys.stream, self._config.group)])
        if isinstance(reply, ServerError):
            return error if reply.kind == "NOGROUP" else reply
        return None

    def to_try(self, now: float) -> list[ServedQueue]:
        """Return the queues whose reads failed and that are to be tried again now."""
        self._has_trouble = any(queue.is_failing or queue.group_since is None for queue in self._queues)
        failing = [queue for queue in self._queues if queue.is_failing and queue.retry_at <= now]
        return [queue for queue in failing if queue.group_since is not None]

    def retry_secs(self) -> float:
        """Return the seconds until a queue that cannot be read is tried again."""
        if not self._has_trouble:
            return float("inf")
        soonest = min((queue.retry_at for queue in self._queues if queue.is_failing), default=float("inf"))
        return max(soonest - time.monotonic(), 0.001)

    def note_success(self, queue: ServedQueue) -> None:
        """Note that a queue was read."""
        if queue.is_failing:
            queue.is_failing = False
            queue.read_failures.clear()

    def note_refusal(self, queue: ServedQueue, error: ServerError) -> None:
        """Note that a queue could not be read: it is left out until its group exists again, or for a while."""
        if error.kind == "NOGROUP":
            logger.warning(
                'consumer group %r of queue "%s" is gone (was the server flushed?); recreating it',
                *(self._config.group, queue.name),
            )
            self._has_trouble = True
            queue.group_since = None
            self._turns.end(queue.share)
        else:
            self._note_failure(queue, error)

    def _note_failure(self, queue: ServedQueue, error: RedisError) -> None:
        self._has_trouble = queue.is_failing = True
        queue.retry_at = time.monotonic() + queue.read_failures.note(error)
        self._turns.end(queue.share)
