"""The real `rsmq` from npm, driven through one long-lived node process that speaks JSON lines (`peer.js`)."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

from servers.binaries import cache_dir
from servers.require import require, unavailable

VERSION = "0.12.4"
SCRIPT = Path(__file__).with_name("peer.js")


def installed() -> Path:
    """Return the folder whose node_modules contain rsmq, in a cache outside the checkout; install it if needed."""
    npm = require("npm")
    folder = cache_dir() / "peers" / f"rsmq-{VERSION}"
    if (folder / "node_modules").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"rsmq-{VERSION}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once install it once
        if (folder / "node_modules").exists():
            return folder
        with tempfile.TemporaryDirectory(prefix="rsmq-", dir=folder.parent) as scratch:
            done = subprocess.run(
                [npm, "install", "--no-save", "--no-audit", "--no-fund", "--prefix", scratch, f"rsmq@{VERSION}"],
                cwd=scratch,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                last = next(reversed(done.stderr.strip().splitlines()), "npm says nothing")
                unavailable(f"rsmq {VERSION} from npm", f"npm install failed: {last}")
            shutil.rmtree(folder, ignore_errors=True)
            # Moved into place when complete: an install that was killed half way must not look installed.
            Path(scratch, "node_modules").rename((folder.mkdir(), folder / "node_modules")[1])
    return folder


class JsError(Exception):
    """An error of the JavaScript client."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class JsRsmq:
    """`async with JsRsmq(port) as js: await js.call("createQueue", qname="q")`."""

    def __init__(self, port: int, ns: str = "rsmq", *, realtime: bool = False) -> None:
        self._arguments = [str(port), ns, "realtime" if realtime else ""]
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._ready = asyncio.Event()
        #: (channel, message) of each notification.
        self.heard: list[tuple[str, str]] = []

    async def __aenter__(self) -> Self:
        command = [require("node"), str(SCRIPT), str(installed()), *self._arguments]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=2**22
        )
        self._reading = asyncio.create_task(self._read())
        async with asyncio.timeout(30):
            await self._ready.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._reading

    async def call(self, method: str, **options: Any) -> Any:
        """Call a method of rsmq."""
        return await self._ask({"method": method, "options": options})

    async def subscribe(self, channel: str) -> None:
        """Subscribe to a channel."""
        await self._ask({"subscribe": channel})

    async def timed(self, times: int, *steps: tuple[str, dict[str, Any]]) -> float:
        """Return how many seconds `times` rounds of these calls take, one after the other."""
        return float(await self._ask({"repeat": times, "steps": steps}))

    async def _ask(self, request: dict[str, Any]) -> Any:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
        return await self._waiting[number]

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            if said.get("event") == "ready":
                self._ready.set()
            elif said.get("event") == "message":
                self.heard.append((said["channel"], said["message"]))
            elif "error" in said:
                self._waiting.pop(said["id"]).set_exception(JsError(**said["error"]))
            else:
                self._waiting.pop(said["id"]).set_result(said.get("result"))
        for future in self._waiting.values():
            future.set_exception(JsError("ended", "the node process ended"))
