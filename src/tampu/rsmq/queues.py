"""The operations on queues as such: create, list, delete, read and set attributes."""

from __future__ import annotations

from tampu.rsmq.errors import NoAttributeSupplied, QueueExists, QueueNotFound
from tampu.rsmq.message import QueueAttributes
from tampu.rsmq.session import Session
from tampu.rsmq.validate import MAX_MAXSIZE, Duration, check_duration, check_maxsize

DEFAULT_VT_SECS = 30
DEFAULT_DELAY_SECS = 0
DEFAULT_MAXSIZE = MAX_MAXSIZE


class QueueOperations(Session):
    """Each is one step on the server, and is repeated when the connection breaks under way."""

    async def create_queue(
        self,
        qname: str,
        vt: Duration | None = DEFAULT_VT_SECS,
        delay: Duration | None = DEFAULT_DELAY_SECS,
        maxsize: int | None = DEFAULT_MAXSIZE,
    ) -> bool:
        """Make a queue; True. `QueueExists` if there is one, which then stays as it is.

        `vt`: for how long a received message is hidden, `delay`: for how long a new one is, in seconds (0 to 9999999).
        `maxsize`: most bytes of a message, 1024 to 65536, -1 for no limit. None stands for the default.

        After a lost connection `QueueExists` may mean that this very call made it.
        """
        queue = self._queues[qname]
        unit = self._options.unit
        checked_vt = check_duration("vt", DEFAULT_VT_SECS if vt is None else vt, unit)
        checked_delay = check_duration("delay", DEFAULT_DELAY_SECS if delay is None else delay, unit)
        checked_maxsize = check_maxsize(DEFAULT_MAXSIZE if maxsize is None else maxsize)
        packed = self._calls.create(queue, self._queues.index, checked_vt, checked_delay, checked_maxsize)
        if not await self._ask(packed):
            raise QueueExists(queue.name)
        return True

    async def list_queues(self) -> list[str]:
        """The names of all queues, sorted."""
        names: list[bytes] = await self._command("SMEMBERS", self._queues.index)
        return sorted(name.decode(errors="replace") for name in names)

    async def delete_queue(self, qname: str) -> bool:
        """Delete a queue with all its messages; True. `QueueNotFound` if there is none.

        After a lost connection `QueueNotFound` may mean that this very call deleted it.
        """
        queue = self._queues[qname]
        if not await self._ask(self._calls.drop(queue, self._queues.index)):
            raise QueueNotFound(queue.name)
        return True

    async def get_queue_attributes(self, qname: str) -> QueueAttributes:
        """The attributes and counters of a queue."""
        return await self._attributes(qname, [])

    async def set_queue_attributes(
        self,
        qname: str,
        vt: Duration | None = None,
        maxsize: int | None = None,
        delay: Duration | None = None,
    ) -> QueueAttributes:
        """Change the attributes that are given and read all. Messages that are in the queue keep their times."""
        if vt is None and maxsize is None and delay is None:
            raise NoAttributeSupplied
        _ = self._queues[qname]  # JavaScript looks at the name before the others
        changes: list[tuple[str, int]] = []
        if vt is not None:
            changes.append(("vt", check_duration("vt", vt, self._options.unit)))
        if maxsize is not None:
            changes.append(("maxsize", check_maxsize(maxsize)))
        if delay is not None:
            changes.append(("delay", check_duration("delay", delay, self._options.unit)))
        return await self._attributes(qname, changes)

    async def _attributes(self, qname: str, changes: list[tuple[str, int]]) -> QueueAttributes:
        queue = self._queues[qname]
        reply = await self._ask(self._calls.attributes(queue, changes))
        if reply is None:
            raise QueueNotFound(queue.name)
        if not changes:
            self._watch_unit(queue, "vt", reply[0])
            self._watch_unit(queue, "delay", reply[1] or b"")
        return QueueAttributes.from_reply(reply, self._options.unit)
