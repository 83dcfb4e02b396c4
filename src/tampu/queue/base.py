"""What every part of a queue stands on: its name, its settings, its connection, and how it ends."""

from __future__ import annotations

import threading
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Self

from tampu.engine.config import ProducerConfig
from tampu.engine.producer import Producer
from tampu.queue.encoded import encode_or_pass
from tampu.queue_events import QueueEvents
from tampu.redis.settings import parse_url, resolve_url
from tampu.waiters import Waiters
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from tampu.sync_queue import SyncQueue
    from tampu.task import Task


class QueueBase:
    """The connection and the name; what can be done with them is said by the classes beside it."""

    def __init__(
        self,
        name: str,
        *,
        url: str | None = None,
        redis_url: str | None = None,
        tls: bool = False,
        max_stream_len: int | None = None,
        max_delay_secs: int | None = None,
        credential_provider: Any = None,
        **settings: Any,
    ) -> None:
        self._url = resolve_url(url, redis_url, tls=tls)
        self._credential_provider = credential_provider
        self._connection_settings = parse_url(self._url, credential_provider=credential_provider)
        refuse_unknown_settings("Queue", settings, ProducerConfig)
        if max_stream_len is not None:
            settings["max_stream_len"] = max_stream_len
        if max_delay_secs is not None:
            settings["max_delay_secs"] = max_delay_secs
        self._config = ProducerConfig(queue_name=name, **settings)
        self._keys = QueueKeys(name)
        self._producer: Producer[Any] = Producer(self._connection_settings, self._config)
        self._producer.encode_with(encode_or_pass(self._producer))
        self._waiters = Waiters(self._producer.pipe, self._keys, self._follow)
        self._closed = False
        self._sync: SyncQueue | None = None
        self._sync_guard = threading.Lock()
        #: The tasks registered here, by name: what a worker of this queue runs.
        self.tasks: dict[str, Task[Any, Any]] = {}

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._keys.queue_name

    @property
    def url(self) -> str:
        """The URL it connects to."""
        return self._url

    @property
    def keys(self) -> QueueKeys:
        """The names of its keys."""
        return self._keys

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def producer(self) -> Producer[Any]:
        """The producer underneath."""
        return self._producer

    def __repr__(self) -> str:
        return f"Queue({self.name!r})"

    async def close(self) -> None:
        """Send what was added and close the connections."""
        if self._closed:
            return
        self._closed = True
        await self._waiters.close()
        await self._producer.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def events(self, *, last_event_id: str = "$") -> QueueEvents:
        """The queue's events from now on, or from an id."""
        return QueueEvents(
            self.name, url=self._url, last_event_id=last_event_id, credential_provider=self._credential_provider
        )

    def _follow(self) -> QueueEvents:
        return self.events()


def refuse_unknown_settings(owner: str, settings: Mapping[str, Any], config: type[Any]) -> None:
    """`TypeError`, as for any argument that a function does not have."""
    allowed = {field.name for field in fields(config)} - {"queue_name"}
    for name in settings:
        if name not in allowed:
            raise TypeError(f"{owner}() got an unexpected setting {name!r}; see {config.__name__} for those it has")
