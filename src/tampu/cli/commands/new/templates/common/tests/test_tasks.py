"""The tasks, called as functions and run by a worker."""

from tampu import Queue
from tampu.testing import run_until_empty

from sample_project.tasks import count_words, queue, send_welcome


def test_words_are_counted() -> None:
    assert count_words("To be or not to be") == {"to": 2, "be": 2, "or": 1, "not": 1}


async def test_a_worker_runs_both_tasks() -> None:
    welcome = await send_welcome.add("ada@example.com")
    words = await count_words.add("to be")
    assert await run_until_empty(queue) == 2
    assert await welcome.result() == "welcome sent to ada@example.com"
    assert await words.result() == {"to": 1, "be": 1}


async def test_a_task_that_fails_is_retried(tampu_queue: Queue) -> None:
    runs: list[str] = []

    @tampu_queue.task(attempts=3)
    async def flaky(email: str) -> None:
        runs.append(email)
        if len(runs) < 3:
            raise ConnectionError("the mail server is down")

    await flaky.add("ada@example.com")
    assert await run_until_empty(tampu_queue) == 3
