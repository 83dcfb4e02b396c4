"""What every operation needs: the options, the keys, and one question to the server with its answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NoReturn

from tampu.errors import ConfigError
from tampu.redis.connection import pack_command
from tampu.rsmq.errors import InvalidValue, QueueNotFound
from tampu.rsmq.keys import Keyring
from tampu.rsmq.options import RsmqOptions, no_hash_tag
from tampu.rsmq.scripts import OUT_OF_RANGE, ScriptCalls
from tampu.rsmq.units import UnitWatch
from tampu.rsmq.validate import MAX_DURATION_SECS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.redis.connection import Part, Reply
    from tampu.redis.faults import ServerError
    from tampu.rsmq.keys import QueueKeys


class Session(ABC):
    """Asks the server on behalf of the operations, which are in the classes below this one."""

    def __init__(self, options: RsmqOptions) -> None:
        self._options = options
        self._queues = Keyring(options.ns)
        self._calls = ScriptCalls(options)
        self._units = UnitWatch()

    @property
    def options(self) -> RsmqOptions:
        """The options this client was made with."""
        return self._options

    @abstractmethod
    async def _ask(self, packed: bytes, *, resend: bool = True) -> Reply:
        """One packed command and its reply. `resend=False`: not again when the connection broke under way."""

    def _explain(self, error: ServerError) -> None:
        """Raise what people can do something about; other errors speak for themselves."""
        if error.kind == "CROSSSLOT":  # a Cluster, reached by the URL of one node
            raise ConfigError(no_hash_tag(self._options.ns)) from error

    async def _command(self, *parts: Part) -> Reply:
        return await self._ask(pack_command(parts))

    async def _delete(self, queue: QueueKeys, message_ids: Sequence[str]) -> list[bool]:
        """Whether there was such a message, for each id."""
        answers: bytes = await self._ask(self._calls.delete(queue, message_ids))
        return [answer == ord("1") for answer in answers]

    def _check_found(self, reply: Reply, queue: QueueKeys, item: str) -> None:
        """Raise what `send` and `receive` answer instead of a list."""
        if reply is None:
            raise QueueNotFound(queue.name)
        if reply == OUT_OF_RANGE:
            self._refuse_own(queue, item)

    def _refuse_own(self, queue: QueueKeys, item: str) -> NoReturn:
        raise InvalidValue(
            item,
            0,
            MAX_DURATION_SECS,
            None,
            f"the hash of queue {queue.name!r} itself holds a {item} out of range: milliseconds, as Rust writes them? "
            f"Then use RsmqOptions(duration_unit='ms'); else mend it with set_queue_attributes",
        )

    def _watch_unit(self, queue: QueueKeys, item: str, own: bytes) -> None:
        """Look at a queue's own vt or delay that was just used."""
        if len(own) > 3 and self._options.unit == "s":  # less than 1000 is beyond suspicion
            self._units.look(queue.name, item, own)
