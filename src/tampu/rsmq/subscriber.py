"""Hears the channel of a queue, on a connection of its own that is made again whenever it breaks."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tampu.errors import Error
from tampu.redis.connection import pack_command
from tampu.redis.pipe import Pipe, backoff_secs

if TYPE_CHECKING:
    from tampu.redis.connection import Connection, Reply
    from tampu.redis.settings import ConnectionSettings

logger = logging.getLogger("tampu.rsmq")

#: So often the server is asked whether it is still there, in seconds; it has as long to answer.
PING_EVERY_SECS = 15.0

_PING = pack_command(("PING",))


class Subscriber:
    """Sets `heard` for each notification, and for each new connection: something may have been sent in between."""

    def __init__(self, settings: ConnectionSettings, channel: bytes, heard: asyncio.Event) -> None:
        self._pipe = Pipe(settings, channel, response_timeout_secs=PING_EVERY_SECS)
        self._channel = channel
        self._heard = heard
        self._is_deaf = False

    async def run(self) -> None:
        """Hear until cancelled. Whatever goes wrong is tried again, for ever: those who listen poll meanwhile."""
        attempt = 0
        try:
            while True:
                try:
                    connection = await self._pipe.up()
                    await self._subscribe(connection)
                    attempt = 0
                    await self._stay(connection)
                except Error as error:
                    if not self._is_deaf:
                        logger.warning("RSMQ channel %s is not heard, polling: %s", self._channel.decode(), error)
                    self._is_deaf = True
                attempt += 1
                await asyncio.sleep(backoff_secs(attempt))
        finally:
            await self._pipe.close()

    async def _subscribe(self, connection: Connection) -> None:
        connection.on_push = self._notice
        await connection.ask("SUBSCRIBE", self._channel)
        if self._is_deaf:
            logger.info("RSMQ channel %s is heard again", self._channel.decode())
        self._is_deaf = False
        self._heard.set()

    async def _stay(self, connection: Connection) -> None:
        """Until the connection is lost. A server that vanished without a word is found out by its silence."""
        lost = asyncio.Event()
        connection.on_loss(lost.set)
        while not lost.is_set() and connection.is_up:
            connection.request(_PING, self._notice)
            try:
                async with asyncio.timeout(PING_EVERY_SECS):
                    await lost.wait()
            except TimeoutError:
                continue
        if connection.loss is not None:
            raise connection.loss

    def _notice(self, reply: Reply) -> None:
        # Also as the answer to a PING: a message that was on its way comes before it.
        if isinstance(reply, list) and reply[0] == b"message":
            self._heard.set()
