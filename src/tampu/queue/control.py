"""The whole queue at once: pause it, resume it, empty it."""

from __future__ import annotations

from tampu.queue.base import QueueBase


class Control(QueueBase):
    """For all workers and all jobs of the queue."""

    async def pause(self) -> None:
        """Have all workers stop taking jobs, within about a second; what runs goes on."""
        await self._producer.ready_pipe().call("SET", self._keys.paused, "1")

    async def resume(self) -> bool:
        """Have the workers go on; False when the queue was not paused."""
        return bool(await self._producer.ready_pipe().call("DEL", self._keys.paused))

    async def is_paused(self) -> bool:
        """Whether it is paused."""
        return bool(await self._producer.ready_pipe().call("EXISTS", self._keys.paused))

    async def purge(self, *, waiting: bool = True, delayed: bool = True) -> int:
        """Delete jobs that wait, now or for their time, with the markers of their ids; how many there were.

        Running jobs, dead letters, repeatables, results and events stay, and so does what is added meanwhile.
        """
        return await self._producer.purge(waiting=waiting, delayed=delayed)
