"""`Worker` is compatible with chasquimq 1.3.0: a name, a handler, run and close."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from api.workers import QUICK, working
from support.waiting import until
from tampu import Cancel, ConfigError, Job, Queue, ResultNotStored, Retry, UnrecoverableError, Worker
from tampu.wire.payload import encode_value

if TYPE_CHECKING:
    from servers.process import Server


async def echo(job: Job[Any]) -> Any:
    return {"got": job.data, "name": job.name}


async def test_a_handler_gets_each_job_and_its_result_is_stored(queue: Queue, server: Server) -> None:
    async with working("q", echo, redis_url=server.url, store_results=True):
        job = await queue.add("mail", [1, 2])
        assert await job.wait_for_result(timeout=20) == {"got": [1, 2], "name": "mail"}
    assert await queue.get_job_result(job.id) == {"got": [1, 2], "name": "mail"}


async def test_a_plain_def_is_a_handler_too(queue: Queue, server: Server) -> None:
    def handler(job: Job[Any]) -> str:
        return f"{job.name} done"

    async with working("q", handler, redis_url=server.url, store_results=True):
        assert await (await queue.add("mail", None)).result(20) == "mail done"


async def test_an_object_with_an_async_call_is_a_handler_too(queue: Queue, server: Server) -> None:
    class Handler:
        async def __call__(self, job: Job[Any]) -> Any:
            return job.data

    async with working("q", Handler(), redis_url=server.url, store_results=True):
        assert await (await queue.add("", 5)).result(20) == 5


async def test_results_are_not_stored_unless_asked_for(queue: Queue, server: Server) -> None:
    async with working("q", echo, redis_url=server.url):
        job = await queue.add("", 1)
        await until(lambda: server.client().xlen(queue.keys.stream) == 0, "the job is done")
    assert await queue.get_job_result(job.id) is None
    assert server.client().exists(queue.keys.result(job.id)) == 0


async def test_a_result_of_none_is_a_result(queue: Queue, server: Server) -> None:
    async def handler(job: Job[Any]) -> None: ...

    async with working("q", handler, redis_url=server.url, store_results=True, result_ttl_ms=1500):
        job = await queue.add("", 1)
        assert await job.result(20) is None
        assert 0 < server.client().ttl(queue.keys.result(job.id)) <= 2  # rounded up to whole seconds


async def test_an_unrecoverable_error_of_another_package_is_not_retried(queue: Queue, server: Server) -> None:
    their_error = type("UnrecoverableError", (RuntimeError,), {})

    class PoisonError(UnrecoverableError):
        pass

    async def handler(job: Job[Any]) -> None:
        raise PoisonError("mine") if job.data == 1 else their_error("theirs")

    async with working("q", handler, redis_url=server.url):
        await queue.add_bulk([{"name": "", "data": 1}, {"name": "", "data": 2}])
        letters: list[dict[str, Any]] = await until(lambda: _letters(queue, 2), "both are dead letters")
    assert {(letter["reason"], letter["error"], letter["attempts"]) for letter in letters} == {
        ("unrecoverable", "mine", 1),
        ("unrecoverable", "theirs", 1),
    }


async def _letters(queue: Queue, count: int) -> list[dict[str, Any]]:
    letters = await queue.peek_dlq()
    return letters if len(letters) >= count else []


async def test_a_job_that_used_up_its_attempts_can_be_replayed(queue: Queue, server: Server) -> None:
    seen: list[int] = []
    broken = True

    async def handler(job: Job[Any]) -> str:
        seen.append(job.attempts_made)
        if broken:
            raise ValueError("not yet")
        return "at last"

    async with working("q", handler, redis_url=server.url, max_attempts=3, store_results=True):
        job = await queue.add("mail", 1)
        [letter] = await until(lambda: _letters(queue, 1), "it is a dead letter")
        assert seen == [0, 1, 2]
        assert (letter["reason"], letter["name"], letter["error_type"]) == ("retries_exhausted", "mail", "ValueError")
        broken = False
        assert await queue.replay_dlq() == 1
        assert await job.result(20) == "at last"
        assert seen[-1] == 0
    assert await queue.peek_dlq() == []


async def test_a_jobs_own_attempts_override_the_workers(queue: Queue, server: Server) -> None:
    seen: list[int] = []

    async def handler(job: Job[Any]) -> None:
        seen.append(job.attempt)
        raise ValueError

    async with working("q", handler, redis_url=server.url, max_attempts=9):
        await queue.add("", 1, attempts=2, backoff=1)
        await until(lambda: _letters(queue, 1), "it is a dead letter")
    assert seen == [0, 1]


async def test_a_handler_can_return_an_outcome(queue: Queue, server: Server) -> None:
    seen: list[int] = []

    async def handler(job: Job[Any]) -> Any:
        if job.name == "cancel":
            return Cancel("not wanted")
        seen.append(job.attempt)
        return Retry(after=0.001) if job.attempt < 2 else "done"

    async with working("q", handler, redis_url=server.url, store_results=True):
        assert await (await queue.add("retry", 1)).result(20) == "done"
        await queue.add("cancel", 1)
        [letter] = await until(lambda: _letters(queue, 1), "it is a dead letter")
    assert seen == [0, 1, 2]
    assert (letter["reason"], letter["error"]) == ("unrecoverable", "not wanted")


async def test_a_job_whose_result_cannot_be_stored_has_succeeded(queue: Queue, server: Server) -> None:
    class Retry:  # another package's class of the same name is an ordinary value
        pass

    runs: list[str] = []

    async def handler(job: Job[Any]) -> Any:
        runs.append(job.name)
        return {1} if job.name == "set" else Retry()

    async with working("q", handler, redis_url=server.url, store_results=True):
        for name in ("set", "retry"):
            job = await queue.add(name, 1)
            with pytest.raises(ResultNotStored, match="the job succeeded, but its result was not stored: "):
                await job.result(20)
            with pytest.raises(ResultNotStored):
                await queue.get_job_result(job.id)
            assert await queue.get_job_result_bulk([job.id]) == [None]
            state = await queue.get_job(job.id)
            assert (state.state, state.result) == ("done", None)
            assert "was not stored" in (state.reason or "")
    assert sorted(runs) == ["retry", "set"]
    assert await _letters(queue, 0) == []


async def test_an_undecodable_payload_does_not_reach_the_handler(queue: Queue, server: Server) -> None:
    seen: list[Any] = []

    async def handler(job: Job[Any]) -> None:
        seen.append(job)

    envelope = b"\x94\xa1x\xc4\x02\xc1\xc1\x01\x00"  # ID x, and a payload of two bytes that are never valid
    server.client().xadd(queue.keys.stream, {"d": envelope})
    async with working("q", handler, redis_url=server.url):
        [letter] = await until(lambda: _letters(queue, 1), "it is a dead letter")
    assert seen == []
    assert letter["reason"] == "decode_failed"
    assert letter["payload"] == envelope


# --- run and close


async def test_calling_run_twice_is_one_run(queue: Queue, server: Server) -> None:
    worker = Worker("q", echo, redis_url=server.url, store_results=True, **QUICK)
    assert (worker.is_running, worker.is_closed, worker.name) == (False, False, "q")
    first, second = asyncio.create_task(worker.run()), asyncio.create_task(worker.run())
    assert await (await queue.add("", 1)).result(20)
    assert worker.is_running
    assert server.client().xinfo_groups(queue.keys.stream)[0]["consumers"] == 1
    await worker.close()
    await worker.close()
    await asyncio.wait_for(asyncio.gather(first, second), 20)
    assert (worker.is_running, worker.is_closed) == (False, True)


async def test_cancelling_a_second_run_does_not_affect_the_first(queue: Queue, server: Server) -> None:
    async with working("q", echo, redis_url=server.url, store_results=True) as worker:
        second = asyncio.create_task(worker.run())
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert await (await queue.add("", 1)).result(20)


async def test_a_worker_closed_before_it_runs_does_not_run(server: Server) -> None:
    worker = Worker("q", echo, redis_url=server.url)
    await worker.close()
    await asyncio.wait_for(worker.run(), 20)
    assert (worker.is_running, worker.is_closed) == (False, True)
    async with Worker("q", echo, redis_url=server.url) as other:
        pass
    assert other.is_closed


async def test_a_worker_that_waits_for_its_server_can_be_closed() -> None:
    worker = Worker("q", echo, redis_url="redis://127.0.0.1:1")
    running = asyncio.create_task(worker.run())
    await until(lambda: worker.is_running, "it runs")
    await worker.close()
    await asyncio.wait_for(running, 20)


async def test_a_wrong_password_ends_the_run_with_an_error(fresh_server: Any) -> None:
    server = fresh_server(requirepass="right")
    worker = Worker("q", echo, redis_url=server.url.replace("right", "wrong"))
    with pytest.raises(RuntimeError, match="password"):
        await asyncio.wait_for(worker.run(), 20)
    assert not worker.is_running


async def test_closing_finishes_running_jobs_and_leaves_the_rest(queue: Queue, server: Server) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()
    seen: list[int] = []

    async def handler(job: Job[Any]) -> None:
        started.set()
        await go_on.wait()
        seen.append(job.data)

    async with working("q", handler, redis_url=server.url, concurrency=1) as worker:
        await queue.add_bulk([{"name": "", "data": number} for number in range(5)])
        await started.wait()
        await worker.close()
        go_on.set()
    assert seen == [0]
    assert server.client().xlen(queue.keys.stream) == 4


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"concurrency": 0}, ValueError, "concurrency"),
        ({"concurrency": "x"}, ValueError, "concurrency"),
        ({"max_attempts": -1}, ValueError, "max_attempts"),
        ({"result_ttl_ms": 0}, RuntimeError, "result_ttl"),
        ({"result_ttl_ms": "x"}, ValueError, "result_ttl_ms"),
        ({"events_enabled": "yes"}, ValueError, "events_enabled"),
        ({"bogus": 1}, TypeError, "bogus"),
        ({"redis_url": "nonsense"}, RuntimeError, "url"),
        ({"url": "redis://a", "redis_url": "redis://b"}, ValueError, "url and redis_url are aliases"),
    ],
)
def test_invalid_settings_of_a_worker_are_refused(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Worker("q", echo, **options)


def test_a_worker_without_anything_to_run_is_refused() -> None:
    for bad, says in [
        ((), "queue must be"),
        (("q",), "needs a handler"),
        (("q", 5), "handler must be"),
        (([],), "queue"),
    ]:
        with pytest.raises(ConfigError, match=says):
            Worker(*bad)  # type: ignore[arg-type]
    assert Worker(queue_name="q", handler=echo).name == "q"
    with pytest.raises(ConfigError, match="two names"):
        Worker("q", echo, queue_name="q")


def test_settings_of_the_consumer_are_accepted() -> None:
    config = Worker(
        "q",
        echo,
        read_block_ms=7,
        read_count=8,
        scheduler_tick_ms=9,
        result_ttl_ms=1001,
        consumer_id="me",
        ack_idle_ms=3,
    ).config
    assert (config.block_ms, config.batch, config.scheduler.tick_interval_ms, config.result_ttl_secs) == (7, 8, 9, 2)
    assert (config.consumer_id, config.ack_idle_ms, config.max_attempts, config.concurrency) == ("me", 3, 25, 100)


async def test_a_schedule_fires_on_a_worker(queue: Queue, server: Server) -> None:
    from tampu import RepeatPattern

    seen: list[Any] = []

    async def handler(job: Job[Any]) -> None:
        seen.append((job.name, job.data))

    await queue.upsert_repeatable_job("tick", {"n": 1}, repeat=RepeatPattern.every(20), limit=2)
    async with working("q", handler, redis_url=server.url):
        await until(lambda: len(seen) == 2, "it fired twice")
        await until(lambda: _no_repeatables(queue), "it is removed after its last fire")
    assert seen == [("tick", {"n": 1})] * 2


async def _no_repeatables(queue: Queue) -> bool:
    return await queue.get_repeatable_jobs() == []


def test_the_payload_is_encoded_as_in_chasquimq() -> None:
    assert encode_value({"a": b"\x00"}) == b"\x81\xa1a\xc4\x01\x00"
