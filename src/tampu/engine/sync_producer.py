"""The producer for programs without an event loop: a Django view, a script, a thread.

    with SyncProducer("redis://127.0.0.1:6379", ProducerConfig(queue_name="emails")) as producer:
        producer.add({"to": "ada@example.com"})

Each method does, and promises, what its namesake of `Producer` does. Any number of threads may share one; a forked
child connects anew. Inside a coroutine use `Producer`: these calls block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from tampu.engine.producer import Producer
from tampu.loop_thread import LoopThread
from tampu.redis.settings import DEFAULT_URL, parse_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime, timedelta
    from types import TracebackType

    from tampu.engine.config import ProducerConfig
    from tampu.engine.dead_letters import ReplayCount
    from tampu.engine.options import AddOptions
    from tampu.redis.settings import CredentialCallback
    from tampu.wire.dlq import DlqEntry
    from tampu.wire.job import JobId
    from tampu.wire.repeat import RepeatableMeta, RepeatableSpec

T = TypeVar("T")

# `id` is the field's name on every level of the API.
# ruff: noqa: A002


class SyncProducer(Generic[T]):
    """Adds jobs to a queue from synchronous code."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        config: ProducerConfig | None = None,
        *,
        credential_provider: CredentialCallback | Any = None,
    ) -> None:
        self._thread = LoopThread()
        self._producer: Producer[T] = Producer(parse_url(url, credential_provider=credential_provider), config)
        self._run = self._thread.run

    # --- its life

    @classmethod
    def connect(cls, url: str = DEFAULT_URL, config: ProducerConfig | None = None) -> Self:
        """A producer that is connected; raises what stands in the way."""
        return cls(url, config).open()

    def open(self) -> Self:
        """Connect now; adds do this by themselves when need be."""
        self._run(self._producer.open())
        return self

    def close(self) -> None:
        """Close the connection for good and end the thread."""
        self._run(self._producer.close())
        self._thread.stop()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def producer_id(self) -> str:
        """This producer's own id."""
        return self._producer.producer_id

    @property
    def stream_key(self) -> str:
        """The key of the stream of waiting jobs."""
        return self._producer.stream_key

    @property
    def delayed_key(self) -> str:
        """The key of the set of delayed jobs."""
        return self._producer.delayed_key

    @property
    def dlq_key(self) -> str:
        """The key of the stream of dead letters."""
        return self._producer.dlq_key

    # --- adding now

    def add(self, payload: T) -> JobId:
        """Add one job."""
        return self._run(self._producer.add(payload))

    def add_with_id(self, id: str, payload: T) -> JobId:
        """Add one job unless one of this id was added lately."""
        return self._run(self._producer.add_with_id(id, payload))

    def add_with_options(self, payload: T, opts: AddOptions) -> JobId:
        """Add one job with options."""
        return self._run(self._producer.add_with_options(payload, opts))

    def add_bulk(self, payloads: Iterable[T]) -> list[JobId]:
        """Add many jobs."""
        return self._run(self._producer.add_bulk(payloads))

    def add_bulk_with_options(self, payloads: Iterable[T], opts: AddOptions) -> list[JobId]:
        """Add many jobs with the same options."""
        return self._run(self._producer.add_bulk_with_options(payloads, opts))

    def add_bulk_named(self, items: Iterable[tuple[str, T]]) -> list[JobId]:
        """Add many jobs, each with a name of its own."""
        return self._run(self._producer.add_bulk_named(items))

    # --- adding for later

    def add_in(self, delay: timedelta | float, payload: T) -> JobId:
        """Add one job that runs after `delay`."""
        return self._run(self._producer.add_in(delay, payload))

    def add_at(self, run_at: datetime | float, payload: T) -> JobId:
        """Add one job that runs at `run_at`."""
        return self._run(self._producer.add_at(run_at, payload))

    def add_in_bulk(self, delay: timedelta | float, payloads: Iterable[T]) -> list[JobId]:
        """Add many jobs that run after `delay`."""
        return self._run(self._producer.add_in_bulk(delay, payloads))

    def add_in_with_options(self, delay: timedelta | float, payload: T, opts: AddOptions) -> JobId:
        """Add one job with options that runs after `delay`."""
        return self._run(self._producer.add_in_with_options(delay, payload, opts))

    def add_at_with_options(self, run_at: datetime | float, payload: T, opts: AddOptions) -> JobId:
        """Add one job with options that runs at `run_at`."""
        return self._run(self._producer.add_at_with_options(run_at, payload, opts))

    def add_in_with_id(self, id: str, delay: timedelta | float, payload: T) -> JobId:
        """Add one job that runs after `delay`, unless one of this id was added lately."""
        return self._run(self._producer.add_in_with_id(id, delay, payload))

    def add_at_with_id(self, id: str, run_at: datetime | float, payload: T) -> JobId:
        """Add one job that runs at `run_at`, unless one of this id was added lately."""
        return self._run(self._producer.add_at_with_id(id, run_at, payload))

    def add_in_bulk_with_ids(self, delay: timedelta | float, items: Iterable[tuple[str, T]]) -> list[JobId]:
        """Add many jobs that run after `delay`, each with an id of its own."""
        return self._run(self._producer.add_in_bulk_with_ids(delay, items))

    # --- everything else

    def cancel_delayed(self, id: str) -> bool:
        """Cancel a job that waits for its time or its retry."""
        return self._run(self._producer.cancel_delayed(id))

    def cancel_delayed_bulk(self, ids: Sequence[str]) -> list[bool]:
        """Cancel several; one answer each."""
        return self._run(self._producer.cancel_delayed_bulk(ids))

    def peek_dlq(self, limit: int = 20, **wanted: Any) -> list[DlqEntry]:
        """Up to `limit` dead letters; the filters are those of `Producer.peek_dlq`."""
        return self._run(self._producer.peek_dlq(limit, **wanted))

    def replay_dlq(self, limit: int = 100, **wanted: Any) -> ReplayCount:
        """Move dead letters back; the filters are those of `Producer.replay_dlq`."""
        return self._run(self._producer.replay_dlq(limit, **wanted))

    def remove_dlq(self, limit: int = 100, **wanted: Any) -> int:
        """Throw dead letters away; the filters are those of `Producer.remove_dlq`."""
        return self._run(self._producer.remove_dlq(limit, **wanted))

    def upsert_repeatable(self, spec: RepeatableSpec[T]) -> str:
        """Register a repeatable job, or replace the one of that key."""
        return self._run(self._producer.upsert_repeatable(spec))

    def ensure_repeatable(self, spec: RepeatableSpec[T]) -> str:
        """Register a repeatable job unless the same is registered already."""
        return self._run(self._producer.ensure_repeatable(spec))

    def list_repeatable(self, limit: int = 100) -> list[RepeatableMeta]:
        """Up to `limit` repeatable jobs, the next to fire first."""
        return self._run(self._producer.list_repeatable(limit))

    def remove_repeatable(self, spec_key: str) -> bool:
        """Remove a repeatable job."""
        return self._run(self._producer.remove_repeatable(spec_key))

    def get_result(self, id: str) -> bytes | None:
        """The MessagePack of what the handler returned."""
        return self._run(self._producer.get_result(id))

    def get_result_bulk(self, ids: Sequence[str]) -> list[bytes | None]:
        """Several results at once."""
        return self._run(self._producer.get_result_bulk(ids))
