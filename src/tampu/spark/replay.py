"""Replays dead letters from a DataFrame, as they are or with a repaired payload. Each letter is moved once and counted.

The letter is read again from the server, so that all a row does not carry (retry settings, time of creation) is kept.
A task that is run again finds the letters it moved gone, and moves nothing twice.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tampu.engine.dead_letters import PAGE, REPLAY, REPLAY_COUNTS_TTL_SECS
from tampu.errors import DecodeError, QueueFullError
from tampu.spark.server import QueueServer
from tampu.spark.sink import FIRST_PAUSE_SECS, LAST_PAUSE_SECS, Written
from tampu.wire.dlq import decode_dlq_fields
from tampu.wire.envelope import decode_job, encode_envelope
from tampu.wire.payload import wrap_bin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tampu.redis.connection import Part
    from tampu.spark.options import WriteOptions
    from tampu.spark.rows import LetterRow


class ReplaySink:
    """Replays the letters of one task. `write` takes (queue, letter) pairs."""

    def __init__(self, options: WriteOptions, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._options = options
        self._sleep = sleep
        self._written = Written()

    def write(self, rows: Iterable[tuple[str, LetterRow]]) -> Written:
        """Move all of them; returns when they are in the stream."""
        servers: dict[str, QueueServer] = {}
        waiting: dict[str, list[LetterRow]] = {}
        try:
            for queue, row in rows:
                if queue not in servers:
                    servers[queue] = QueueServer(self._options.url, queue, (REPLAY,))
                letters = waiting.setdefault(queue, [])
                letters.append(row)
                if len(letters) >= PAGE:
                    self._move(servers[queue], letters)
                    waiting[queue] = []
            for queue, letters in waiting.items():
                if letters:
                    self._move(servers[queue], letters)
        finally:
            for server in servers.values():
                server.close()
        return self._written

    def _move(self, server: QueueServer, letters: list[LetterRow]) -> None:
        keys = server.keys
        found = server.call_many([("XRANGE", keys.dlq, row.entry_id, row.entry_id) for row in letters])
        moves: list[tuple[Part, ...]] = []
        for row, entries in zip(letters, found, strict=True):
            move = _move_of(row, entries[0][1]) if entries else None
            if move is None:
                self._written.skipped += 1
            else:
                moves.append(move)
        paused, pause = 0.0, FIRST_PAUSE_SECS
        while moves:
            arguments = [part for move in moves for part in move]
            head: list[Part] = [self._options.max_waiting, REPLAY_COUNTS_TTL_SECS]
            moved, is_full = server.run(REPLAY, (keys.dlq, keys.stream, keys.replays), head + arguments)
            self._written.added += moved
            if not is_full:
                self._written.skipped += len(moves) - moved  # somebody else moved them meanwhile
                return
            moves = moves[moved:]
            if paused >= self._options.wait_timeout_secs:
                raise QueueFullError(
                    f"queue {keys.queue_name!r} has been full for {paused:.0f} s (option maxWaiting="
                    f"{self._options.max_waiting}, waitTimeout): is a worker running?"
                )
            self._sleep(pause)
            paused, pause = (0.0, FIRST_PAUSE_SECS) if moved else (paused + pause, min(pause * 2, LAST_PAUSE_SECS))


def _move_of(row: LetterRow, fields: list[bytes]) -> tuple[Part, ...] | None:
    """The script's arguments for one letter; None when its envelope cannot be read."""
    letter = decode_dlq_fields(row.entry_id, fields)
    try:
        job = decode_job(letter.payload)
    except DecodeError:
        return None
    slot = job.payload_slot
    if row.packed is not None:
        slot = row.packed if job.payload_format == "inline" else wrap_bin(row.packed)
    envelope = encode_envelope(job.id, slot, job.created_at_ms, 0, job.retry)
    return row.entry_id, envelope, letter.name if row.name is None else row.name, job.id
