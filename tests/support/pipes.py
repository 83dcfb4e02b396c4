"""Pipes for tests: closed in the end, with settings changed where a test cannot wait for the defaults."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tampu.redis.pipe import Pipe
from tampu.redis.settings import parse_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tampu.redis.scripts import Script

TAG = "{chasqui:q}"


@contextlib.asynccontextmanager
async def open_pipe(
    url: str, *, scripts: Sequence[Script] = (), credential_provider: Any = None, **settings: Any
) -> AsyncIterator[Pipe]:
    """`async with open_pipe(server.url, response_timeout_secs=0.1) as pipe:`"""
    pipe = Pipe(replace(parse_url(url, credential_provider=credential_provider), **settings), TAG.encode(), scripts)
    try:
        yield pipe
    finally:
        await pipe.close()
