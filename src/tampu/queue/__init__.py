"""The queue people use: adds jobs, makes tasks of functions, and answers questions about its jobs.

queue = Queue("emails")

@queue.task(attempts=5, backoff=BackoffSpec.exponential(200))
async def welcome(to: str, subject: str = "hi") -> dict: ...

job = await welcome.add("ada@example.com")
print(await job.result(timeout=10))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tampu.queue.adding import Adding
from tampu.queue.answers import Answers
from tampu.queue.base import refuse_unknown_settings
from tampu.queue.control import Control
from tampu.queue.dead_letters import DeadLetters
from tampu.queue.tasks import TaskMaking
from tampu.sync_queue import SyncQueue

if TYPE_CHECKING:
    from tampu.engine.config import ProducerConfig

__all__ = ["Queue", "refuse_unknown_settings"]


class Queue(TaskMaking, Adding, DeadLetters, Answers, Control):
    """One queue. Make one per process and queue, and share it between tasks of one event loop; `sync` is for the rest.

    `url` is `redis://`, `rediss://`, `unix://`, `redis+sentinel://`, `redis+cluster://` or `embedded://`; without it
    `TAMPU_URL` counts, then `redis://127.0.0.1:6379`. It connects at the first use.
    """

    @property
    def sync(self) -> SyncQueue:
        """The same calls for code without an event loop; any number of threads may use it."""
        if self._sync is None:
            twin = Queue(self.name, url=self._url, credential_provider=self._credential_provider, **_own(self._config))
            with self._sync_guard:  # of several threads that ask first, all get the same
                self._sync = self._sync or SyncQueue(twin, self.tasks)
        return self._sync

    async def close(self) -> None:
        """Send what was added and close the connections."""
        await super().close()
        if self._sync is not None:
            self._sync.close()


def _own(config: ProducerConfig) -> dict[str, Any]:
    """The settings of a config, for another queue like it."""
    return {name: value for name, value in vars(config).items() if name != "queue_name"}
