"""A window: jobs that travel to the server in one script call. Here they are packed; the chain sends them.

Packing is the producer's hot path: one MessagePack pass, one format and one append per job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tampu.wire.payload import wrap_bin

if TYPE_CHECKING:
    from tampu.errors import Error

#: Most jobs, and about how many bytes, one script call carries; a larger job travels alone.
MAX_JOBS = 256
MAX_BYTES = 256 * 1024

#: Kinds of jobs, as `add_window.lua` knows them.
NOW = b"n"
NOW_WITH_ID = b"i"
DELAYED = b"d"
DELAYED_WITH_ID = b"e"


def pack_part(part: bytes) -> bytes:
    """One argument of a command as RESP."""
    return b"$%d\r\n%b\r\n" % (len(part), part)


def pack_envelope(head: bytes, payload: bytes, tail: bytes, inline: bool) -> bytes:
    """An envelope as one argument: `head` ends with the id, `tail` starts with the time of creation."""
    size = len(payload)
    if inline:
        return b"$%d\r\n%b%b%b\r\n" % (len(head) + size + len(tail), head, payload, tail)
    if size < 0x100:
        return b"$%d\r\n%b\xc4%c%b%b\r\n" % (len(head) + 2 + size + len(tail), head, size, payload, tail)
    slot = wrap_bin(payload)
    return b"$%d\r\n%b%b%b\r\n" % (len(head) + len(slot) + len(tail), head, slot, tail)


class Window:
    """Jobs packed for one script call, and what became of them.

    When `tell` is called, `codes` tells it job by job, and `error` holds for the jobs behind the last code, and for
    those with the code 'u' (added, but not safely). Neither means that all were added.
    """

    # On the class: a window of one job is made as often as jobs are added one by one, and most of this never changes.
    codes = ""
    failure = ""
    error: Error | None = None
    #: Its place in the chain; 0 outside of one.
    number = 0
    #: The TTL that this window gives its chain; 0 leaves it as it is.
    chain_ttl_secs = 0
    first_sent_at: float | None = None
    #: Whether it was sent and the connection broke before an answer came.
    may_be_applied = False
    #: With `min_replicas`: the server's answer, and how many replicas have the window.
    reply: Any = None
    replicas = 0
    #: Bytes so far, extra keys, arguments behind the fixed ones.
    size = 0
    keys = 0
    arguments = 0
    # The run that is open: jobs of the same kind and name share one header, written when it ends.
    run_at = -1
    run_kind = b""
    run_name = b""
    run_count = 0

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.body: list[bytes] = []
        self.packed_keys: list[bytes] = []

    def tell(self) -> None:
        """Tell those who wait what became of their jobs."""
        raise NotImplementedError

    def has_room(self, extra: int) -> bool:
        """Whether another job of `extra` bytes fits. The first always does."""
        return not self.ids or (len(self.ids) < MAX_JOBS and self.size + extra <= MAX_BYTES)

    def put(
        self, job_id: str, kind: bytes, name: bytes, envelope: bytes, due: bytes = b"", keys: tuple[bytes, ...] = ()
    ) -> None:
        """Append one job; envelope, due time and keys are packed arguments already."""
        if kind != self.run_kind or name != self.run_name:
            self._begin_run(kind, name)
        self.ids.append(job_id)
        self.run_count += 1
        self.body.append(envelope)
        self.size += len(envelope)
        if due:
            self.body.append(due)
            self.arguments += 1
        if keys:
            self.packed_keys.extend(keys)
            self.keys += len(keys)
            self.size += sum(map(len, keys))
        self.arguments += 1

    def put_many(self, ids: list[str], name: bytes, envelopes: list[bytes]) -> None:
        """Append a run of immediate jobs without explicit ids."""
        if self.run_kind != NOW or name != self.run_name:
            self._begin_run(NOW, name)
        count = len(envelopes)
        self.ids.extend(ids)
        self.run_count += count
        self.arguments += count
        self.body.extend(envelopes)

    def _begin_run(self, kind: bytes, name: bytes) -> None:
        self._end_run()
        self.run_kind = kind
        self.run_name = name
        self.run_count = 0
        self.run_at = len(self.body)
        self.body.append(b"")
        self.arguments += 3

    def _end_run(self) -> None:
        if self.run_at >= 0:
            count = b"%d" % self.run_count
            self.body[self.run_at] = b"$1\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (
                *(self.run_kind, len(count), count),
                *(len(self.run_name), self.run_name),
            )

    def packed(self, header: WindowHeader) -> bytes:
        """The whole command, numbered as it is now."""
        self._end_run()
        return header.packed(self) + b"".join(self.body)


class WindowHeader:
    """What all windows of one chain have in common, packed once."""

    __slots__ = ("_after_ttl", "_after_ttl_of_one", "_before_keys", "_before_number", "_shared_keys")

    def __init__(
        self,
        *,
        sha: str,
        chain_key: str,
        stream_key: str,
        delayed_key: str,
        cap: int,
        overflow: str,
        dedup_ttl_secs: int,
        idmp_producer: str,
    ) -> None:
        self._before_keys = b"$7\r\nEVALSHA\r\n" + pack_part(sha.encode())
        self._shared_keys = b"".join(pack_part(key.encode()) for key in (chain_key, stream_key, delayed_key))
        self._before_number = self._before_keys + pack_part(b"3") + self._shared_keys
        fixed: tuple[Any, ...] = (cap, overflow, dedup_ttl_secs, idmp_producer)
        self._after_ttl = b"".join(pack_part(str(value).encode()) for value in fixed)
        self._after_ttl_of_one = self._after_ttl + b"".join(map(pack_part, (b"1", NOW, b"1")))

    def packed(self, window: Window) -> bytes:
        """Everything before the window's body: command, keys, and the fixed arguments."""
        keys = self._before_number
        if window.keys:
            keys = b"%b%b%b%b" % (
                *(self._before_keys, pack_part(b"%d" % (3 + window.keys))),
                *(self._shared_keys, b"".join(window.packed_keys)),
            )
        number, jobs = b"%d" % window.number, b"%d" % len(window.ids)
        # EVALSHA, sha, number of keys, 3 + n keys, 7 fixed arguments, the body's.
        return b"*%d\r\n%b$%d\r\n%b\r\n%b%b$%d\r\n%b\r\n" % (
            *(13 + window.keys + window.arguments, keys, len(number), number),
            b"$1\r\n0\r\n" if window.chain_ttl_secs == 0 else pack_part(b"%d" % window.chain_ttl_secs),
            *(self._after_ttl, len(jobs), jobs),
        )

    def packed_of_one(self, window: Window, name: bytes, envelope: bytes) -> bytes:
        """The whole command for one job that is to run now: the same bytes, in one step."""
        number = b"%d" % window.number
        return b"*17\r\n%b$%d\r\n%b\r\n%b%b$%d\r\n%b\r\n%b" % (
            *(self._before_number, len(number), number),
            b"$1\r\n0\r\n" if window.chain_ttl_secs == 0 else pack_part(b"%d" % window.chain_ttl_secs),
            *(self._after_ttl_of_one, len(name), name, envelope),
        )
