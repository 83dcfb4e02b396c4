"""A window: jobs that travel to the server in one script call. Here they are packed; the chain sends them.

Packing is the producer's hot path: one MessagePack pass and one format per job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def pack_number(number: int) -> bytes:
    """A number as one argument."""
    return pack_part(b"%d" % number)


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
        if self.run_at == 0 and self.run_kind == NOW and self.number and header.has_short_form:
            self.body[0] = b""
            return header.packed_short(self, self.run_name, self.run_count) + b"".join(self.body)
        self._end_run()
        return header.packed(self) + b"".join(self.body)


class WindowHeader:
    """What all windows of one chain have in common, packed once."""

    __slots__ = ("_after_ttl", "_before_keys", "_shared_keys", "_short", "has_short_form")

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
        chain, stream, delayed = (pack_part(key.encode()) for key in (chain_key, stream_key, delayed_key))
        self._shared_keys = chain + stream + delayed
        self._short = self._before_keys + pack_number(2) + chain + stream + pack_number(cap)
        #: Whether numbered windows of jobs that all run now, under one name, may travel in the script's short form.
        self.has_short_form = overflow == "reject" and not idmp_producer
        fixed = (pack_number(cap), pack_part(overflow.encode()), pack_number(dedup_ttl_secs))
        self._after_ttl = b"".join((*fixed, pack_part(idmp_producer.encode())))

    def packed_short(self, window: Window, name: bytes, jobs: int) -> bytes:
        """Everything before the envelopes, in the short form."""
        # EVALSHA, sha, number of keys, 2 keys, cap, number, TTL, name, the envelopes.
        place = pack_number(window.number) + pack_number(window.chain_ttl_secs)
        return b"*%d\r\n%b%b%b" % (9 + jobs, self._short, place, pack_part(name))

    def packed_lone(self, number: int, name: bytes, envelope: bytes) -> bytes:
        """The whole command for one job, in the short form and in one step; the chain's TTL stays as it is."""
        digits = b"%d" % number
        values = (self._short, len(digits), digits, len(name), name, len(envelope), envelope)
        return b"*10\r\n%b$%d\r\n%b\r\n$1\r\n0\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % values

    def packed(self, window: Window) -> bytes:
        """Everything before the window's body: command, keys, and the fixed arguments."""
        # EVALSHA, sha, number of keys, 3 + n keys, 8 fixed arguments, the body's.
        parts = (
            b"*%d\r\n" % (14 + window.keys + window.arguments),
            self._before_keys,
            pack_number(3 + window.keys),
            self._shared_keys,
            *window.packed_keys,
            pack_part(b""),
            pack_number(window.number),
            pack_number(window.chain_ttl_secs),
            self._after_ttl,
            pack_number(len(window.ids)),
        )
        return b"".join(parts)
