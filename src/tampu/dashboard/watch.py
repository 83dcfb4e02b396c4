"""One poller for all viewers: it looks at the queues every 2 s while somebody looks, and stops 15 s after the last."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from tampu.errors import Error
from tampu.inspect.glance import Glance, chunks, count_workers, glance
from tampu.inspect.meters import last_minute, line_of, meter_key
from tampu.inspect.views import redacted_letter
from tampu.wire.dlq import decode_dlq_fields
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tampu.inspect.registry import ServerView
    from tampu.redis.client import Client
    from tampu.wire.meter import Minute

#: How often it looks while there are up to `FAST_QUEUES`; with more of them it looks less often, in seconds.
LOOK_SECS = 2.0
FAST_QUEUES = 250
#: How long it goes on after the last request, and how long one look may take, in seconds.
IDLE_SECS = 15.0
PATIENCE_SECS = 2.0
#: Looks over which rates are computed.
LOOKS = 8
#: Queues whose newest dead letter is read in one look.
MAX_LETTERS_READ = 50
#: Errors of a server that is away, and not of a request.
AWAY = (Error, OSError, TimeoutError)


class Watch:
    """What all queues look like now. Without a server, it keeps what it saw last, and `fault` says why."""

    def __init__(self, view: ServerView) -> None:
        self.view = view
        self.glances: dict[str, Glance] = {}
        #: Live workers, the last hour, and the newest error, by queue.
        self.workers: dict[str, int] = {}
        self.lines: dict[str, list[Minute]] = {}
        self.errors: dict[str, tuple[int, str]] = {}
        self.now_ms = 0
        self.fault = ""
        self.server = ""
        self._before: dict[str, deque[Glance]] = {}
        self._minute: dict[str, int] = {}
        self._keys: dict[str, QueueKeys] = {}
        self._seen_at = 0.0
        self._rounds = 0
        self._task: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()

    async def ready(self) -> None:
        """Note a viewer, and wait for the first look."""
        self._seen_at = time.monotonic()
        if self._task is None or self._task.done():
            self._looked.clear()
            self._task = asyncio.create_task(self._run(), name="tampu-dashboard-watch")
        if not self._looked.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_SECS):
                    await self._looked.wait()
            if not self._looked.is_set():
                self.fault = self.fault or "it has not answered yet"

    async def _run(self) -> None:
        while time.monotonic() - self._seen_at < IDLE_SECS:
            started = time.monotonic()
            try:
                async with asyncio.timeout(PATIENCE_SECS * 5 if self._rounds == 0 else PATIENCE_SECS):
                    await self._look()
                self.fault = ""
            except AWAY as error:
                self.fault = str(error) or "it did not answer in time"
            self._looked.set()
            pause = LOOK_SECS * max(len(self.glances) / FAST_QUEUES, 1)
            await asyncio.sleep(max(pause - (time.monotonic() - started), 0.1))

    async def _look(self) -> None:
        client = await self.view.client()
        names = sorted(await self.view.find())
        self._keys = {name: self._keys.get(name) or QueueKeys(name) for name in names}
        clients = await self.view.clients(names)
        self.now_ms = await client.server_time_ms()
        keys = list(self._keys.values())
        self.glances = await glance(clients, keys, self.now_ms)
        for name, one in self.glances.items():
            self._before.setdefault(name, deque(maxlen=LOOKS)).append(one)
        for known in (self._before, self.workers, self.lines, self.errors, self._minute):
            for gone in known.keys() - self.glances.keys():
                known.pop(gone)
        # Workers come and go slowly: a third of the queues are asked for theirs in each look.
        part = keys[self._rounds % 3 :: 3] if self._rounds else keys
        self._rounds += 1
        self.workers |= await count_workers(clients, part, self.glances)
        await self._read_lines(clients, keys)
        await self._read_errors(clients, keys)
        if not self.server:
            self.server = await _product(client)

    async def renew(self, name: str) -> None:
        """Look at one queue at once: who has changed it must not see it as it was."""
        if (keys := self._keys.get(name)) is not None:
            client = await self.view.client(name)
            self.now_ms = await client.server_time_ms()
            self.glances |= await glance({name: client}, [keys], self.now_ms)

    async def _read_lines(self, clients: Mapping[str, Client], keys: list[QueueKeys]) -> None:
        """Read what was counted in the last hour, once a minute."""
        minute = last_minute(self.now_ms)
        stale = [each for each in keys if self._minute.get(each.queue_name) != minute]
        for some in chunks(stale, clients):
            asked = [("HGET", meter_key(each), "line") for each in some]
            for each, packed in zip(some, await clients[some[0].queue_name].call_each(asked), strict=True):
                line = line_of(packed if isinstance(packed, bytes) else None, self.now_ms)
                self.lines[each.queue_name] = line
                # A fold that comes late is looked for again in the next rounds.
                if line[-1].waiting is not None or self._rounds % 10 == 0:
                    self._minute[each.queue_name] = minute

    async def _read_errors(self, clients: Mapping[str, Client], keys: list[QueueKeys]) -> None:
        """Read the newest dead letter of queues with more or fewer of them than before."""
        changed = [
            each for each in keys if self.glances[each.queue_name].dead != self.errors.get(each.queue_name, (0,))[0]
        ]
        for some in chunks(changed[:MAX_LETTERS_READ], clients):
            asked = [("XREVRANGE", each.dlq, "+", "-", "COUNT", 1) for each in some]
            for each, found in zip(some, await clients[some[0].queue_name].call_each(asked), strict=True):
                text = ""
                if isinstance(found, list) and found:
                    letter = redacted_letter(decode_dlq_fields(found[0][0].decode(), found[0][1]))
                    text = letter.error_text or letter.reason
                self.errors[each.queue_name] = (self.glances[each.queue_name].dead, text)

    def flow(self, queue: str) -> tuple[float | None, float | None]:
        """Return jobs added and jobs delivered per second over the last looks; None where the server does not count."""
        looks = self._before.get(queue) or deque[Glance]()
        if len(looks) < 2:
            return None, None
        first, last = looks[0], looks[-1]
        secs = (last.at_ms - first.at_ms) / 1000
        before, after = first.read_in_all, last.read_in_all
        if secs <= 0 or before is None or after is None or after < before:
            return None, None
        return max(after + last.waiting - before - first.waiting, 0) / secs, (after - before) / secs

    def died(self, queue: str) -> int:
        """Return the jobs that died in the last five minutes, or at least in the last looks."""
        looks = self._before.get(queue)
        seen = looks[-1].dead - looks[0].dead if looks else 0
        return max(sum(minute.dead for minute in self.lines.get(queue, ())[-5:]), seen, 0)

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


async def _product(client: Client) -> str:
    """Return the server's product and version; `server` if the user may not ask."""
    try:
        info: Any = await client.call("INFO", "server")
    except Error:
        return "server"
    fields = dict(line.split(":", 1) for line in info.decode(errors="replace").splitlines() if ":" in line)
    valkey = fields.get("valkey_version")
    return f"Valkey {valkey}" if valkey else f"Redis {fields.get('redis_version', 'unknown')}"
