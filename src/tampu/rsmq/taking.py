"""Gets messages out of a queue, as the server tells of them, for those who hand them to people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from tampu.rsmq.session import Session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.rsmq.keys import QueueKeys

#: What the server tells of a message: id, body, receive count, first received.
Fields = list[Any]
#: One message, or none and the seconds until the next is due: -1 if there is nothing to wait for.
Taken = tuple[Fields | None, float]
#: For how long to hide: a number in units of the hash, the queue's own (None), or for ever.
Hiding = int | Literal["pop"] | None

_NOTHING_TO_WAIT_FOR = -1.0


class Taking(Session):
    """The receiving half of a session."""

    async def _take_one(self, queue: QueueKeys, vt: Hiding) -> Taken:
        found, wait = await self._take(queue, vt, 1)
        return (found[0] if found else None), wait

    async def _take(self, queue: QueueKeys, vt: Hiding, most: int) -> tuple[list[Fields], float]:
        """Up to `most` messages in one step; if there are none, the seconds until there may be."""
        while True:
            # A second pop would lose what the first has taken; a second receive only delays it by its vt.
            reply = await self._ask(self._calls.receive(queue, vt, most), resend=vt != "pop")
            if type(reply) is not list:
                self._check_found(reply, queue, "vt")
            if reply[0]:
                self._watch_unit(queue, "vt", reply[0])
            if len(reply) > 2:
                return [reply[at : at + 4] for at in range(1, len(reply), 4)], 0.0
            if reply[1] < 0:
                return [], _NOTHING_TO_WAIT_FOR
            if reply[1] > 0:
                return [], reply[1] / (1000 if self._options.precision == "ms" else 1_000_000)
            # Only members without a body were found, so many that the server paused: the messages are behind them.

    async def _take_for_all(self, queue: QueueKeys, vt: Hiding, callers: int) -> Sequence[Taken | Exception]:
        """One message each for so many callers, as far as there are some."""
        answers: list[Taken | Exception] = []
        while len(answers) < callers:
            missing = callers - len(answers)
            try:
                found, wait = await self._take(queue, vt, missing)
            except Exception as error:  # what was taken before belongs to those who came first
                return [*answers, *[error] * missing]
            answers += [(fields, 0.0) for fields in found] or [(None, wait)] * missing
        return answers
