"""Windows: jobs that are added in one script call, packed here and sent by the chain.

Packing is the producer's hot path: one MessagePack pass and one format per job. A window resolves the futures of its
callers: one per job of single adds (`SharedWindow`, `SingleWindow`), one per bulk window (`BulkWindow`, `BulkResults`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from tampu.base.checks import MAX_CALL_BYTES, MAX_CALL_ENTRIES
from tampu.errors import Error, OutcomeUnknownError, QueueFullError, RedisError
from tampu.redis.faults import ServerError
from tampu.redis.scripts import AddCode, load_script
from tampu.wire.job import DuplicateJobId, JobId

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tampu.wire.keys import QueueKeys

ADD_WINDOW = load_script("add_window")
ADD_PLAIN_WINDOW = load_script("add_plain_window")
#: Ends a transaction of large jobs. Sent with its text: if the server did not know it by its SHA, it would keep the
#: XADDs.
COMMIT = load_script("commit_window")

#: Jobs of this size, in bytes, are sent as plain XADDs in a transaction: a script would copy each of them three times.
#: Smaller ones cost the server less in a script. A job that is added alone has to be larger.
LARGE_BYTES = 2048
LARGE_ALONE_BYTES = 32 * 1024

#: Windows of one bulk that are packed or in flight; the rest stays in the caller's iterable.
BULK_WINDOWS_AHEAD = 4

_encode = msgspec.msgpack.Encoder().encode


def pack_part(part: bytes) -> bytes:
    """Return one argument of a command as RESP."""
    return b"$%d\r\n%b\r\n" % (len(part), part)


def pack_number(number: int) -> bytes:
    """Return a number as one argument of a command."""
    return pack_part(b"%d" % number)


class Due(NamedTuple):
    """The due time of a delayed job, as the script knows it."""

    #: "in": milliseconds from now, by the server's clock; "at": an epoch time in milliseconds.
    kind: Literal["in", "at"]
    ms: int


class IdKeys:
    """Packs the keys that a job with an explicit ID needs."""

    __slots__ = ("_cancel", "_index", "_marker")

    def __init__(self, keys: QueueKeys) -> None:
        self._marker = keys.dedup_marker("").encode()
        self._cancel = keys.cancel_mark("").encode()
        self._index = keys.delayed_index("").encode()

    def packed(self, job_id: str, due: Due | None) -> tuple[bytes, ...]:
        """Return its dedup marker, its cancel mark, which a new add removes, and of a delayed job its index."""
        encoded = job_id.encode()
        keys = pack_part(self._marker + encoded), pack_part(self._cancel + encoded)
        return keys if due is None else (*keys, pack_part(self._index + encoded))


@dataclass(frozen=True, slots=True)
class LargeJobs:
    """Large immediate jobs with one name: their payloads, and what their envelopes have around them."""

    name: bytes
    heads: list[bytes]
    bodies: list[bytes]
    tail: bytes


class Window:
    """Jobs packed for one script call, and its outcome.

    When `resolve` is called, `codes` holds a code for each of the first jobs. `error` applies to the others, and to
    those with the code 'u' (added, but not replicated in time). With neither, all jobs were added.
    """

    # Class attributes: a `SingleWindow` is made for every single add, and most of these never change.
    codes = ""
    failure = ""
    error: Error | None = None
    #: Its number in the chain; 0 for a window of the Spark sink that is not in one.
    number = 0
    #: Tells a window that is sent again from another one with the same number.
    digest = b""
    #: The TTL that this window sets on its chain; 0 leaves it unchanged.
    chain_ttl_secs = 0
    #: True if the connection broke after it was sent and before its reply.
    may_be_applied = False
    #: With `min_replicas`: the server's reply, and how many replicas have the window.
    reply: Any = None
    replicas = 0
    #: Bytes so far, keys and arguments beyond the fixed ones.
    size = 0
    keys = 0
    arguments = 0
    # The open run: consecutive jobs with the same attributes, which are written when the run ends.
    run_at = -1
    run_name = b""
    run_due_kind = ""
    run_has_ids = False
    run_count = 0
    #: Set if all its jobs are large, and whether they were sent in a transaction: sent again, the script adds them.
    large: LargeJobs | None = None
    was_transacted = False

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.body: list[bytes] = []
        self.packed_keys: list[bytes] = []

    def resolve(self) -> None:
        """Resolve the futures of the callers."""
        raise NotImplementedError

    def has_room(self, extra: int) -> bool:
        """Return True if another job of `extra` bytes fits. The first always does."""
        return not self.ids or (len(self.ids) < MAX_CALL_ENTRIES and self.size + extra <= MAX_CALL_BYTES)

    def put(
        self, job_id: str, name: bytes, envelope: bytes, due: Due | None = None, keys: tuple[bytes, ...] = ()
    ) -> None:
        """Append one job. The envelope is a packed argument; the keys are those of an explicit ID."""
        has_id, due_kind = bool(keys), "" if due is None else due.kind
        if self.run_at < 0 or name != self.run_name or due_kind != self.run_due_kind or has_id is not self.run_has_ids:
            self._begin_run(name, due_kind, has_ids=has_id)
        if due is not None:
            self.run_times.append(due.ms)
        self.ids.append(job_id)
        self.run_count += 1
        self.body.append(envelope)
        self.size += len(envelope)
        if keys:
            self.packed_keys.extend(keys)
            self.keys += len(keys)
            self.size += sum(map(len, keys))
        self.arguments += 1

    def put_many(self, ids: list[str], name: bytes, envelopes: list[bytes], due: Due | None = None) -> None:
        """Append a run of jobs without explicit ids. The packed envelopes may be joined."""
        self._begin_run(name, "" if due is None else due.kind, has_ids=False)
        if due is not None:
            self.run_times += [due.ms] * len(ids)
        count = len(ids)
        self.ids.extend(ids)
        self.run_count += count
        self.arguments += count
        self.body.extend(envelopes)

    def put_large(self, ids: list[str], jobs: LargeJobs) -> None:
        """Make this the window of large jobs."""
        self.ids.extend(ids)
        self.large = jobs

    def for_script(self) -> None:
        """Pack large jobs for the script, like all other jobs."""
        if self.large is not None:
            jobs, self.large = self.large, None
            ids, self.ids = self.ids, []
            pairs = zip(jobs.heads, jobs.bodies, strict=True)
            self.put_many(ids, jobs.name, [pack_part(b"%b%b%b" % (head, body, jobs.tail)) for head, body in pairs])

    def _begin_run(self, name: bytes, due_kind: str, *, has_ids: bool) -> None:
        self._end_run()
        self.run_name = name
        self.run_due_kind = due_kind
        self.run_has_ids = has_ids
        self.run_times: list[int] = []
        self.run_count = 0
        self.run_at = len(self.body)
        self.body.append(b"")
        self.arguments += 1

    def _end_run(self) -> None:
        if self.run_at >= 0:
            attributes: dict[str, Any] = {"count": self.run_count, "name": self.run_name.decode()}
            if self.run_times:
                times = self.run_times
                attributes[self.run_due_kind] = times[0] if times.count(times[0]) == len(times) else times
            if self.run_has_ids:
                attributes["ids"] = True
            self.body[self.run_at] = pack_part(_encode(attributes))

    def packed(self, header: WindowHeader) -> bytes:
        """Return the whole command with the current number."""
        self.for_script()
        if self.run_at == 0 and not self.run_due_kind and not self.run_has_ids and header.has_short_form:
            self.body[0] = b""
            return header.packed_short(self, self.run_name, self.run_count) + b"".join(self.body)
        self._end_run()
        return header.packed(self) + b"".join(self.body)


class WindowHeader:
    """The arguments that all windows of one chain share, packed once."""

    __slots__ = (
        "_after_ttl",
        "_before_keys",
        "_commit",
        "_shared_keys",
        "_short",
        "_stream",
        "chain_key",
        "has_short_form",
        "transaction_probe",
    )

    def __init__(
        self,
        keys: QueueKeys,
        chain_key: str,
        *,
        cap: int,
        overflow: str,
        dedup_ttl_secs: int,
    ) -> None:
        self._before_keys = b"$7\r\nEVALSHA\r\n" + pack_part(ADD_WINDOW.sha.encode())
        self.chain_key = chain_key
        shared = (chain_key, keys.stream, keys.delayed, keys.wake, keys.due)
        chain, stream, *others = (pack_part(key.encode()) for key in shared)
        self._shared_keys = b"".join((chain, stream, *others))
        plain_call = b"$7\r\nEVALSHA\r\n" + pack_part(ADD_PLAIN_WINDOW.sha.encode())
        self._short = plain_call + pack_number(2) + chain + stream + pack_number(cap)
        self._stream = stream
        self._commit = b"$4\r\nEVAL\r\n" + pack_part(COMMIT.text.encode()) + pack_number(2) + chain + stream
        self._commit += pack_number(cap)
        text = b"redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 0) redis.call('XDEL', KEYS[1], '0-1') return 1"
        probe = b"*4\r\n$4\r\nEVAL\r\n" + pack_part(text) + pack_number(1) + stream
        #: Succeeds, and changes nothing, if this user may send and take back a transaction: the reply to EXEC is [1].
        self.transaction_probe = b"*1\r\n$5\r\nMULTI\r\n%b*1\r\n$4\r\nEXEC\r\n" % probe
        #: True if windows of immediate jobs with one name may be sent in the short form.
        self.has_short_form = overflow == "reject"
        self._after_ttl = pack_number(cap) + pack_part(overflow.encode()) + pack_number(dedup_ttl_secs)

    def packed_short(self, window: Window, name: bytes, jobs: int) -> bytes:
        """Return everything before the envelopes, in the short form."""
        # EVALSHA, sha, number of keys, 2 keys, cap, number, TTL, name, the envelopes.
        place = pack_number(window.number) + pack_number(window.chain_ttl_secs)
        return b"*%d\r\n%b%b%b" % (9 + jobs, self._short, place, pack_part(name))

    def packed_single(self, number: int, name: bytes, envelope: bytes) -> bytes:
        """Return the whole command for one job in the short form; it leaves the chain's TTL unchanged."""
        digits = b"%d" % number
        values = (self._short, len(digits), digits, len(name), name, len(envelope), envelope)
        return b"*10\r\n%b$%d\r\n%b\r\n$1\r\n0\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % values

    def pieces(self, window: Window, jobs: LargeJobs) -> tuple[list[bytes], int]:
        """Return a window of large jobs as (pieces of packed commands, number of commands): a transaction of XADDs."""
        name = b"$1\r\nn\r\n" + pack_part(jobs.name) if jobs.name else b""
        add = b"*%d\r\n$4\r\nXADD\r\n%b$1\r\n*\r\n$1\r\nd\r\n" % (7 if name else 5, self._stream)
        end = b"%b\r\n%b" % (jobs.tail, name)
        pieces: list[bytes] = []
        before = b"*1\r\n$5\r\nMULTI\r\n"
        for head, body in zip(jobs.heads, jobs.bodies, strict=True):
            size = len(head) + len(body) + len(jobs.tail)
            pieces += (b"%b%b$%d\r\n%b" % (before, add, size, head), body)
            before = end
        ids = b"".join(pack_part(job_id.encode()) for job_id in window.ids)
        place = pack_number(window.number) + pack_number(window.chain_ttl_secs)
        # EVAL, text, number of keys, 2 keys, cap, number, TTL, the ids.
        commit = b"*%d\r\n%b%b%b" % (8 + len(window.ids), self._commit, place, ids)
        pieces.append(b"%b%b*1\r\n$4\r\nEXEC\r\n" % (before, commit))
        return pieces, len(window.ids) + 3

    def packed(self, window: Window) -> bytes:
        """Return everything before the window's body: command, keys and the fixed arguments."""
        # EVALSHA, sha, number of keys, 5 + n keys, 7 fixed arguments, the body's.
        parts = (
            b"*%d\r\n" % (15 + window.keys + window.arguments),
            self._before_keys,
            pack_number(5 + window.keys),
            self._shared_keys,
            *window.packed_keys,
            pack_number(window.number),
            pack_number(window.chain_ttl_secs),
            self._after_ttl,
            pack_part(window.digest),
            pack_number(len(window.ids)),
        )
        return b"".join(parts)


class Opening(Window):
    """The first window of a chain: adds nothing, and makes the server remember the chain."""

    number = 1

    def resolve(self) -> None:
        pass


class SharedWindow(Window):
    """A window of single adds: each job has its own future."""

    def __init__(self) -> None:
        super().__init__()
        self.futures: list[asyncio.Future[JobId]] = []

    def resolve(self) -> None:
        is_plain = not self.codes and self.error is None
        for position, (job_id, future) in enumerate(zip(self.ids, self.futures, strict=True)):
            if future.done():  # its caller was cancelled
                continue
            if is_plain:
                future.set_result(JobId(job_id))
            elif (error := _error_of(self, position, job_id)) is not None:
                future.set_exception(error)
            else:
                is_duplicate = _code_of(self, position) == AddCode.DUPLICATE
                future.set_result(DuplicateJobId(job_id) if is_duplicate else JobId(job_id))


class SingleWindow(SharedWindow):
    """A window of one immediate job that is sent at once, alone.

    Jobs added one by one cost the producer 11 % less time than with a `SharedWindow` (`task.add`: 17 %).
    """

    def __init__(self, job_id: str, name: bytes, envelope: bytes, future: asyncio.Future[JobId]) -> None:
        self.job_id = job_id
        self.name = name
        self.envelope = envelope
        self.future = future

    # Made on demand, as they are rarely needed.
    @property
    def ids(self) -> list[str]:  # type: ignore[override]
        return [self.job_id]

    @property
    def futures(self) -> list[asyncio.Future[JobId]]:  # type: ignore[override]
        return [self.future]

    def packed(self, header: WindowHeader) -> bytes:
        """Return the whole command, for a resend; the first send uses the faster `WindowHeader.packed_single`."""
        window = Window()
        window.number, window.chain_ttl_secs = self.number, self.chain_ttl_secs
        window.put(self.job_id, self.name, pack_part(self.envelope))
        return window.packed(header)


class BulkWindow(Window):
    """A window of one bulk, with one future for all of its jobs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.future: asyncio.Future[None] = loop.create_future()

    async def all_added(self) -> list[JobId] | None:
        """Wait for the outcome. Return the ids if all jobs were added, else None."""
        job_ids = [*map(JobId, self.ids)]  # created while the server is busy: nearly always, all jobs are added
        await self.future
        return None if self.codes or self.error is not None else job_ids

    def resolve(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


def _code_of(window: Window, position: int) -> str:
    """Return the `AddCode` of one job of an answered window."""
    if position < len(window.codes):
        return window.codes[position]
    return AddCode.ADDED if window.error is None else AddCode.UNKNOWN


def _error_of(window: Window, position: int, job_id: str) -> Error | None:
    code = _code_of(window, position)
    if code == AddCode.FULL:
        return QueueFullError(f"the queue is full (max_stream_len): job {job_id} was not added", refused=[job_id])
    if code == AddCode.ERROR:
        reason = ServerError(window.failure) if window.failure else "the reason was lost with the connection"
        return RedisError(f"job {job_id} was not added: {reason}")
    if code == AddCode.UNKNOWN and window.error is not None:
        return _own_copy(window.error, [job_id])
    return None


def _own_copy(error: Error, ids: list[str]) -> Error:
    """Return a copy of a window's error that names only one caller's jobs."""
    copy = error.__class__.__new__(error.__class__)
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__
    if isinstance(copy, OutcomeUnknownError):
        copy.ids = ids
    return copy


class BulkResults:
    """Waits for the windows of one bulk, in order, and combines their outcomes."""

    def __init__(self, windows: Iterable[BulkWindow] = ()) -> None:
        self._windows = deque(windows)
        self.accepted: list[JobId] = []
        self._refused: list[str] = []
        self._unknown: list[str] = []
        self._unknown_because: OutcomeUnknownError | None = None
        self._failure: Error | None = None

    async def keep_ahead(self, window: BulkWindow) -> bool:
        """Add one window and wait until few enough are in flight. Return False once a job was not added."""
        self._windows.append(window)
        await asyncio.sleep(0)  # lets the connection send the window before the next chunk is packed
        while len(self._windows) >= BULK_WINDOWS_AHEAD:
            await self._collect_one()
        return self.error() is None

    async def finish(self) -> list[JobId]:
        """Wait for all windows and return all ids in order. Raises if any job was refused or failed."""
        while self._windows:
            await self._collect_one()
        error = self.error()
        if error is not None:
            raise error
        return self.accepted

    def error(self) -> Error | None:
        """Return the error so far, if any: unknown outcomes take precedence over failures, those over refusals."""
        error: Error | None = None
        if self._unknown_because is not None:
            error = _own_copy(self._unknown_because, [*self._unknown])
        elif self._failure is not None:
            error = self._failure
        elif self._refused:
            error = QueueFullError(
                f"the queue is full (max_stream_len): {len(self._refused)} of "
                f"{len(self._refused) + len(self.accepted)} jobs were not added; see .accepted and .refused",
                refused=self._refused,
            )
        if error is not None:
            error.accepted = [*self.accepted]
        return error

    async def _collect_one(self) -> None:
        window = self._windows[0]
        job_ids = await window.all_added()
        self._windows.popleft()
        if job_ids is not None:
            self.accepted.extend(job_ids)
            return
        for position, job_id in enumerate(window.ids):
            code = _code_of(window, position)
            if code == AddCode.ADDED:
                self.accepted.append(JobId(job_id))
            elif code == AddCode.DUPLICATE:
                self.accepted.append(DuplicateJobId(job_id))
            elif code == AddCode.FULL:
                self._refused.append(job_id)
            elif code == AddCode.UNKNOWN and isinstance(window.error, OutcomeUnknownError):
                self._unknown.append(job_id)
                self._unknown_because = window.error
            elif self._failure is None:
                self._failure = _error_of(window, position, job_id)
