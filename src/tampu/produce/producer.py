"""The producer: adds jobs to one queue, and inspects and changes the queue from outside of a worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
import weakref
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from tampu.base.checks import check_delay_ms, check_instant_ms, check_int, check_job_id, check_text, invalid
from tampu.config import ProducerConfig
from tampu.errors import ConfigError, DecodeError, EncodeError, ShutdownError
from tampu.inspect.admin import QueueAdmin
from tampu.inspect.dead_letters import DlqFilter, ReplayCount
from tampu.produce.adder import Adder, Minter
from tampu.produce.chain import Chain
from tampu.produce.options import AddOptions
from tampu.produce.window import ADD_PLAIN_WINDOW, ADD_WINDOW, Due, WindowHeader
from tampu.redis import calls
from tampu.redis.calls import INSPECT_SCRIPTS
from tampu.redis.client import Client
from tampu.redis.settings import DEFAULT_URL, ConnectionSettings, parse_url
from tampu.wire.codec import QueueCodec
from tampu.wire.job import DuplicateJobId, JobId
from tampu.wire.keys import QueueKeys
from tampu.wire.payload import encode_value, encode_values, wrap_bin
from tampu.wire.repeat import RepeatableMeta, RepeatableSpec, decode_spec
from tampu.wire.scan import bin_content
from tampu.wire.typed import TypedPayload, inline_only

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from datetime import datetime, timedelta
    from types import TracebackType
    from typing import Unpack

    from tampu.inspect.dead_letters import DlqQuery
    from tampu.redis.settings import CredentialCallback
    from tampu.wire.dlq import DlqEntry

T = TypeVar("T")

#: Shortest response timeout: a server may be silent this long while it forks for a snapshot, in seconds.
MIN_RESPONSE_TIMEOUT_SECS = 2.0

_NO_OPTIONS = AddOptions()


class Producer(Generic[T]):
    """Adds jobs to a queue. Create it with `Producer.connect`; coroutines of one event loop may share it.

    Adds survive a lost connection: they are sent again and applied once. Once an add returns, the job is stored on the
    server. An add raises `EncodeError` if the payload cannot be encoded, `ConfigError` if an argument is not allowed,
    `QueueFullError` if the queue is full, `OutcomeUnknownError` if the job may or may not have been added, and
    `RedisError` if the server cannot be reached within `retry_for_secs` or refuses the job.
    """

    def __init__(self, settings: ConnectionSettings, config: ProducerConfig | None = None) -> None:
        self._config = config = config or ProducerConfig()
        self._keys = QueueKeys(config.queue_name)
        self._producer_id = str(uuid.uuid4())
        scripts = (ADD_WINDOW, ADD_PLAIN_WINDOW, *INSPECT_SCRIPTS)
        response_timeout = _response_timeout_secs(settings, config)
        self._client = Client(
            *(settings, self._keys.tag.encode(), scripts), response_timeout_secs=response_timeout, may_lack_scripts=True
        )
        self._chain = Chain(
            self._client,
            self._window_header,
            patience_secs=config.retry_for_secs,
            min_replicas=config.min_replicas,
            min_replicas_timeout_ms=config.min_replicas_timeout_ms,
        )
        encode = encode_value if config.payload_type is None else TypedPayload(config.payload_type).encode
        self._encode: Callable[[Any], bytes] = encode if config.payload_format == "bin" else inline_only(encode)
        self._adder = Adder(
            self._chain,
            self._keys,
            Minter(),
            inline=config.payload_format == "inline",
            max_payload_bytes=config.max_payload_bytes,
        )
        self._codec = QueueCodec.of(config.codec, config.queue_name)
        self._admin = QueueAdmin(
            *(self._client, self._keys),
            operator=config.operator,
            max_stream_len=config.max_stream_len,
            codec=self._codec,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        _producers.add(self)

    @classmethod
    def connect(
        cls,
        url: str = DEFAULT_URL,
        config: ProducerConfig | None = None,
        *,
        credential_provider: CredentialCallback | Any = None,
    ) -> Self:
        """Connect to a server. `await` the call or enter it: `async with Producer.connect(url) as producer`.

        Raises `ConfigError` if the URL is not valid, and `RedisError` if the server cannot be reached.
        """
        return cls(parse_url(url, credential_provider=credential_provider), config)

    async def open(self) -> Self:
        """Connect and return the producer. Optional: the first add connects too.

        Raises `RedisError` if the server cannot be reached.
        """
        self._bind_to_loop()
        await self._client.up(max(self._config.retry_for_secs, 1))
        return self

    async def close(self) -> None:
        """Send pending jobs, wait for the replies, and close the connection."""
        if self._closed:
            return
        self._bind_to_loop()
        self._adder.flush()
        await self._chain.drain(max(self._config.retry_for_secs, 1))
        self._closed = True
        self._loop = None  # so that every later call raises ShutdownError
        self._chain.close()
        try:
            await self._chain.forget()
        finally:
            await self._client.close()

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        try:
            return await self.open()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- properties

    @property
    def is_used(self) -> bool:
        """True from its first use until it is closed."""
        return self._loop is not None

    @property
    def producer_id(self) -> str:
        """Return the unique ID of this producer."""
        return self._producer_id

    @property
    def stream_key(self) -> str:
        """Return the key of the stream of waiting jobs."""
        return self._keys.stream

    @property
    def delayed_key(self) -> str:
        """Return the key of the sorted set of delayed jobs."""
        return self._keys.delayed

    @property
    def dlq_key(self) -> str:
        """Return the key of the stream of dead letters."""
        return self._keys.dlq

    @property
    def client(self) -> Client:
        """Return the client of this producer, for other commands on the same queue."""
        return self._client

    def ready_client(self) -> Client:
        """Return the client, ready for the running event loop. Raises `ShutdownError` after `close`."""
        self._bind_to_loop()
        return self._client

    @property
    def admin(self) -> QueueAdmin:
        """Return the object that inspects and changes the queue. Raises `ShutdownError` after `close`."""
        self._bind_to_loop()
        return self._admin

    @property
    def encode(self) -> Callable[[Any], bytes]:
        """Return the function that encodes a payload as MessagePack, for the `add_packed` methods."""
        return self._encode

    @property
    def config(self) -> ProducerConfig:
        """Return the settings."""
        return self._config

    # --- adding now

    async def add(self, payload: T) -> JobId:
        """Add one job and return its ID."""
        if asyncio.get_running_loop() is not self._loop:  # skips a call in the common case
            self._bind_to_loop()
        packed = self._encode(payload)
        if self._codec is not None:
            packed = self._sealed(packed, "")
        return await self._adder.add(packed, _NO_OPTIONS)

    async def add_with_id(self, id: str, payload: T) -> JobId:  # noqa: A002 - the field's name everywhere
        """Add one job, unless one with this ID was added within `dedup_ttl_secs`: then `.is_new` of the ID is False."""
        return await self.add_with_options(payload, AddOptions(id=id))

    async def add_with_options(self, payload: T, opts: AddOptions) -> JobId:
        """Add one job with a name, an ID or retry settings."""
        return await self.add_packed(self._encode(payload), _checked_options(opts))

    async def add_packed(
        self,
        packed: bytes,
        opts: AddOptions,
        *,
        delay: timedelta | float | None = None,
        run_at: datetime | float | None = None,
    ) -> JobId:
        """Add one job whose payload is already MessagePack. It runs after `delay`, at `run_at`, or now."""
        due = None if delay is None and run_at is None else self._due(delay, run_at)
        self._bind_to_loop()
        return await self._adder.add(packed if self._codec is None else self._sealed(packed, opts.name), opts, due)

    async def add_packed_bulk(
        self,
        packed: Sequence[bytes],
        opts: AddOptions,
        *,
        delay: timedelta | float | None = None,
        run_at: datetime | float | None = None,
    ) -> list[JobId]:
        """Add many jobs whose payloads are already MessagePack, with the same options. Return their IDs in order."""
        due = self._due(delay, run_at)
        self._bind_to_loop()
        return await self._adder.add_list(self._all_sealed(packed, opts.name), opts, due)

    async def add_packed_each(
        self,
        packed: Sequence[bytes],
        options: Sequence[AddOptions],
        *,
        delay: timedelta | float | None = None,
        run_at: datetime | float | None = None,
    ) -> list[JobId]:
        """Add many jobs with the same name whose payloads are already MessagePack, each with its own options."""
        due = self._due(delay, run_at)
        self._bind_to_loop()
        name = options[0].name if options else ""
        return await self._adder.add_each(zip(self._all_sealed(packed, name), options, strict=True), due)

    async def add_debounced(self, packed: bytes, opts: AddOptions, quiet_ms: int, at_most_ms: int | None) -> JobId:
        """Add a delayed job with an explicit ID, or replace it; see `task.using(debounce=)` and `throttle`.

        Without `at_most_ms`, at most one job of this ID becomes due in `quiet_ms`.
        """
        self._bind_to_loop()
        keys, job_id = self._keys, str(opts.id)
        member = self._adder.delayed_member(self._all_sealed([packed], opts.name)[0], opts)
        used = (
            *(keys.delayed, keys.delayed_index(job_id), keys.dedup_marker(job_id)),
            *(keys.cancel_mark(job_id), keys.result(job_id), keys.wake, keys.due),
        )
        self._client.add_scripts((calls.DEBOUNCE,))  # only now: other producers do without it
        is_replaced = await calls.debounce(
            self._client,
            used,
            job_id=job_id,
            member=member,
            quiet_ms=quiet_ms,
            at_most_ms=at_most_ms,
            ttl_secs=self._config.dedup_ttl_secs,
        )
        return DuplicateJobId(job_id) if is_replaced else JobId(job_id)

    def _due(self, delay: timedelta | float | None, run_at: datetime | float | None) -> Due | None:
        if delay is not None:
            return self._due_after(delay)
        return None if run_at is None else self._due_at(run_at)

    async def add_bulk(self, payloads: Iterable[T] | AsyncIterable[T]) -> list[JobId]:
        """Add many jobs and return their IDs in order. On an error, its `accepted` holds the IDs that were added.

        A list is encoded as a whole before any job is sent; any other iterable is sent while it is read.
        """
        if payloads.__class__ is list:  # the usual case: skip the checks for other types
            self._bind_to_loop()
            return await self._adder.add_list(self._encode_many(payloads), _NO_OPTIONS)
        return await self.add_bulk_with_options(payloads, _NO_OPTIONS)

    async def add_bulk_with_options(self, payloads: Iterable[T] | AsyncIterable[T], opts: AddOptions) -> list[JobId]:
        """Add many jobs with the same options, like `add_bulk`. An ID is only allowed with a single payload."""
        self._bind_to_loop()
        opts = _checked_options(opts)
        if isinstance(payloads, AsyncIterable):
            if opts.id is not None:
                raise ConfigError("an asynchronous bulk cannot have an ID: call add_with_id for each payload")
            return await self._adder.add_stream(aiter(payloads), partial(self._encode_many, name=opts.name), opts)
        payloads = _checked_bulk("payloads", payloads)
        if opts.id is not None:
            found = [*payloads]
            if len(found) > 1:
                raise ConfigError(f"one ID cannot be used for {len(found)} payloads: call add_with_id for each payload")
            return [await self.add_packed(self._encode(payload), opts) for payload in found]
        if isinstance(payloads, Sequence):
            return await self._adder.add_list(self._encode_many(payloads, name=opts.name), opts)
        return await self._adder.add_stream(iter(payloads), partial(self._encode_many, name=opts.name), opts)

    async def add_bulk_named(self, items: Iterable[tuple[str, T]]) -> list[JobId]:
        """Add many jobs given as (name, payload). All are checked and encoded before any is sent."""
        pairs = _checked_pairs("(name, payload)", items)
        self._bind_to_loop()
        return await self._adder.add_each(
            [(self._sealed(self._encode(payload), name), AddOptions(name=name)) for name, payload in pairs]
        )

    def _sealed(self, packed: bytes, name: str) -> bytes:
        return packed if self._codec is None else self._codec.seal_payload(packed, name)

    def _all_sealed(self, packed: Sequence[bytes], name: str) -> Sequence[bytes]:
        codec = self._codec
        return packed if codec is None else codec.seal_payloads(packed, name)

    def _encode_many(self, payloads: Sequence[Any], position: int = 0, name: str = "") -> list[bytes]:
        """Encode payloads. The error of one that cannot be encoded names its position, counted from `position`."""
        if self._encode is encode_value:
            try:
                bodies = encode_values(payloads)
            except EncodeError:
                pass  # raised again below, with the item's position
            else:
                return bodies if self._codec is None else list(self._all_sealed(bodies, name))
        bodies = []
        try:
            bodies.extend(map(self._encode, payloads))
        except EncodeError as error:
            raise EncodeError(f"payload {position + len(bodies)} of this bulk: {error}") from error
        return list(self._all_sealed(bodies, name))

    # --- adding for later

    async def add_in(self, delay: timedelta | float, payload: T) -> JobId:
        """Add one job that runs after `delay` (a timedelta or seconds), by the server's clock."""
        return await self.add_in_with_options(delay, payload, _NO_OPTIONS)

    async def add_at(self, run_at: datetime | float, payload: T) -> JobId:
        """Add one job that runs at `run_at` (a datetime, UTC if naive, or epoch seconds); a past time means now."""
        return await self.add_at_with_options(run_at, payload, _NO_OPTIONS)

    async def add_in_bulk(self, delay: timedelta | float, payloads: Iterable[T]) -> list[JobId]:
        """Add many jobs that run after `delay`."""
        due = self._due_after(delay)
        payloads = _checked_bulk("payloads", payloads)
        self._bind_to_loop()
        return await self._adder.add_list(self._encode_many([*payloads]), _NO_OPTIONS, due)

    async def add_in_with_options(self, delay: timedelta | float, payload: T, opts: AddOptions) -> JobId:
        """Add one job with options that runs after `delay`."""
        return await self.add_packed(self._encode(payload), _checked_options(opts), delay=delay)

    async def add_at_with_options(self, run_at: datetime | float, payload: T, opts: AddOptions) -> JobId:
        """Add one job with options that runs at `run_at`."""
        return await self.add_packed(self._encode(payload), _checked_options(opts), run_at=run_at)

    async def add_in_with_id(self, id: str, delay: timedelta | float, payload: T) -> JobId:  # noqa: A002
        """Add one job that runs after `delay`, unless a job with this ID was added within `dedup_ttl_secs`."""
        return await self.add_in_with_options(delay, payload, AddOptions(id=id))

    async def add_at_with_id(self, id: str, run_at: datetime | float, payload: T) -> JobId:  # noqa: A002
        """Add one job that runs at `run_at`, unless a job with this ID was added within `dedup_ttl_secs`."""
        return await self.add_at_with_options(run_at, payload, AddOptions(id=id))

    async def add_in_bulk_with_ids(self, delay: timedelta | float, items: Iterable[tuple[str, T]]) -> list[JobId]:
        """Add many jobs given as (ID, payload) that run after `delay`."""
        due = self._due_after(delay)
        pairs = _checked_pairs("(id, payload)", items)
        self._bind_to_loop()
        bodies = [(self._sealed(self._encode(payload), ""), AddOptions(id=job_id)) for job_id, payload in pairs]
        return await self._adder.add_each(bodies, due)

    def _due_after(self, delay: timedelta | float) -> Due | None:
        delay_ms = check_delay_ms(delay)
        self._check_delay(delay_ms)
        return Due("in", delay_ms) if delay_ms else None

    def _due_at(self, run_at: datetime | float) -> Due:
        instant_ms = check_instant_ms(run_at)
        self._check_delay(instant_ms - self._adder.now_ms())
        return Due("at", instant_ms)

    def _check_delay(self, delay_ms: int) -> None:
        limit = self._config.max_delay_secs
        if limit and delay_ms // 1000 > limit:
            raise ConfigError(f"a delay of {delay_ms // 1000} s exceeds max_delay_secs ({limit} s)")

    # --- cancelling

    async def cancel_delayed(self, id: str) -> bool:  # noqa: A002
        """Cancel a job that waits for its due time or its retry. Return False if there is no such delayed job."""
        check_job_id(id)
        [is_cancelled] = await self.admin.cancel_delayed([id], detail=id)
        return is_cancelled

    async def cancel_delayed_bulk(self, ids: Sequence[str]) -> list[bool]:
        """Cancel several delayed jobs. Return one bool for each, as `cancel_delayed` does."""
        for job_id in ids:
            check_job_id(job_id)
        return await self.admin.cancel_delayed(ids)

    # --- dead letters

    async def peek_dlq(self, limit: int = 20, **query: Unpack[DlqQuery]) -> list[DlqEntry]:
        """Return up to `limit` dead letters, oldest first."""
        return await self.admin.peek_dlq(check_int("limit", limit), DlqFilter.of(query))

    async def replay_dlq(self, limit: int = 100, **query: Unpack[DlqQuery]) -> ReplayCount:
        """Move up to `limit` dead letters back into the queue and reset their attempts. Return how many were moved."""
        return await self.admin.replay_dlq(check_int("limit", limit), DlqFilter.of(query))

    async def remove_dlq(self, limit: int = 100, **query: Unpack[DlqQuery]) -> int:
        """Delete up to `limit` dead letters. Return how many were deleted."""
        return await self.admin.remove_dlq(check_int("limit", limit), DlqFilter.of(query))

    # --- repeatable jobs

    async def upsert_repeatable(self, spec: RepeatableSpec[T]) -> str:
        """Register a repeatable job or replace the one with its key, whose fire count then starts again.

        Return its key. Raises `ConfigError` if it would never fire.
        """
        return await self.register_packed(spec, self._encode_of(spec), keep_identical=False)

    async def ensure_repeatable(self, spec: RepeatableSpec[T]) -> str:
        """Register a repeatable job unless an identical one exists: safe to call at every start. Return its key."""
        return await self.register_packed(spec, self._encode_of(spec), keep_identical=True)

    async def register_packed(self, spec: RepeatableSpec[Any], packed: bytes, *, keep_identical: bool) -> str:
        """Register a repeatable job whose payload is already MessagePack; `spec.payload` is ignored. Return its key."""
        self._bind_to_loop()
        body = packed
        if self._codec is not None:
            body = await self._sealed_before(spec, packed) if keep_identical else self._sealed(packed, spec.job_name)
        self._adder.check_size(body, which=f" of {spec.job_name!r}")
        stored = spec.stored_with(wrap_bin(body) if self._config.payload_format == "bin" else body)
        await self._admin.upsert_repeatable(stored, keep_identical=keep_identical)
        return stored.key

    async def _sealed_before(self, spec: RepeatableSpec[Any], packed: bytes) -> bytes:
        """Return the sealed payload of a stored schedule if it holds this payload: a new one never looks identical."""
        stored = await self._admin.packed_spec(spec.resolved_key())
        with contextlib.suppress(DecodeError):
            sealed = bin_content(decode_spec(stored or b"").payload_slot)
            if self._codec is not None and sealed and self._codec.open_payload(sealed, spec.job_name) == packed:
                return sealed
        return self._sealed(packed, spec.job_name)

    async def list_repeatable(self, limit: int = 100) -> list[RepeatableMeta]:
        """Return up to `limit` repeatable jobs without their payloads, the next to fire first."""
        return await self.admin.repeatables(check_int("limit", limit))

    async def remove_repeatable(self, spec_key: str) -> bool:
        """Remove a repeatable job. Return False if there is none with this key."""
        check_text("spec_key", spec_key)
        return await self.admin.remove_repeatable(spec_key)

    def _encode_of(self, spec: RepeatableSpec[T]) -> bytes:
        if not isinstance(spec, RepeatableSpec):
            raise invalid("spec", spec, "a RepeatableSpec")
        return self._encode(spec.payload)

    # --- the whole queue

    async def purge(self, *, waiting: bool = True, delayed: bool = True) -> int:
        """Delete waiting and delayed jobs, with their dedup markers and indexes. Return how many were deleted.

        Jobs that a worker holds and jobs added meanwhile are kept. A queue of thousands is purged in steps, each of
        which is atomic.
        """
        return await self.admin.purge(waiting=waiting, delayed=delayed)

    # --- results

    async def get_result(self, id: str) -> bytes | None:  # noqa: A002
        """Return the stored result as MessagePack; None if there is none yet, or it has expired.

        Raises `DecodeError` if the queue has a codec that cannot open it.
        """
        check_job_id(id)
        return await self.admin.result(id)

    async def get_result_bulk(self, ids: Sequence[str]) -> list[bytes | None]:
        """Return several stored results, in the order of the IDs."""
        return list(await asyncio.gather(*(self.get_result(job_id) for job_id in ids)))

    # --- internals

    def _window_header(self, chain_id: str) -> WindowHeader:
        config = self._config
        return WindowHeader(
            self._keys,
            self._keys.chain(chain_id),
            cap=config.max_stream_len,
            overflow=config.overflow,
            dedup_ttl_secs=config.dedup_ttl_secs,
        )

    def _bind_to_loop(self) -> None:
        """Start with a new connection on first use in another event loop or in the child of a fork."""
        if self._closed:
            raise ShutdownError("the producer is closed")
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None:
                self._abandon()
            self._loop = loop

    def _abandon(self) -> None:
        self._client.abandon()
        self._chain.abandon()
        self._adder.abandon()


def _response_timeout_secs(settings: ConnectionSettings, config: ProducerConfig) -> float:
    """Return how long the server may be silent before the connection counts as lost, in seconds.

    Half of `retry_for_secs` leaves a new connection the other half to send an add again.
    """
    patience = max(config.retry_for_secs / 2, MIN_RESPONSE_TIMEOUT_SECS)
    # WAIT keeps a healthy server silent for up to its timeout.
    wait_secs = config.min_replicas_timeout_ms / 1000 if config.min_replicas else 0
    return min(settings.response_timeout_secs, patience) + wait_secs


def _checked_options(opts: AddOptions) -> AddOptions:
    if not isinstance(opts, AddOptions):
        raise invalid("opts", opts, "AddOptions")
    return opts


def _checked_bulk(field: str, items: Iterable[Any]) -> Iterable[Any]:
    """Return `items`. Raises `ConfigError` for a type that is nearly always a single payload by mistake."""
    if isinstance(items, str | bytes | bytearray | Mapping) or not isinstance(items, Iterable):
        raise invalid(field, items, "an iterable; add() takes a single payload")
    return items


def _checked_pairs(form: str, items: Iterable[Any]) -> list[tuple[Any, Any]]:
    pairs = [*_checked_bulk("items", items)]
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise invalid("items", pair, f"pairs of {form}")
    return pairs


_producers: weakref.WeakSet[Producer[Any]] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Begin new chains: the parent keeps its own, and jobs sent with the same numbers would be dropped as resends."""
    for producer in list(_producers):
        producer._abandon()
        producer._loop = None


os.register_at_fork(after_in_child=_after_fork_in_child)
