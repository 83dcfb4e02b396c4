"""The real chasquimq 1.3.0 worker on a queue that tampu adds to: it runs, retries, promotes and fires tampu's jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from interop.peers import chasquimq_queue, chasquimq_worker
from support.producers import open_producer
from support.queues import QueueView
from support.waiting import until
from tampu.produce.options import AddOptions, TaskAddOptions
from tampu.wire.envelope import decode_job
from tampu.wire.extras import JobExtras, encode_extras
from tampu.wire.payload import decode_result
from tampu.wire.repeat import RepeatableSpec, RepeatPattern
from tampu.wire.retry import BackoffSpec, JobRetryOverride

if TYPE_CHECKING:
    from servers.process import Server

pytestmark = pytest.mark.servers("redis86")

QUICK = BackoffSpec.fixed(10, jitter_ms=0)


async def is_drained(view: QueueView) -> None:
    await until(lambda: view.length() == 0 and not view.delayed(), "the worker has acknowledged all of it")


async def test_it_drains_immediate_named_and_explicit_jobs(server: Server) -> None:
    view = QueueView(server, "q")
    async with open_producer(server.url) as producer:
        ids = [await producer.add({"n": 0}), *(await producer.add_bulk([{"n": number} for number in range(1, 500)]))]
        named = await producer.add_bulk_named([("mail", {"n": number}) for number in range(500, 600)])
        explicit = [await producer.add_with_id(f"order {number}", [number, "ä", None, 2.5]) for number in range(20)]
        inside = {job.id: job for job in view.jobs()}
        async with chasquimq_worker(server.url) as worker:
            runs = await worker.lines(620)
            await is_drained(view)
    by_id = {run["id"]: run for run in runs}
    assert sorted(by_id) == sorted([*ids, *named, *explicit])  # each once
    for number, job_id in enumerate([*ids, *named]):
        assert by_id[job_id]["data"] == {"n": number}
        assert by_id[job_id]["name"] == ("mail" if number >= 500 else "")
    for number, job_id in enumerate(explicit):
        assert by_id[job_id]["data"] == [number, "ä", None, 2.5]
    for job_id, run in by_id.items():
        assert (run["created"], run["attempt"]) == (inside[job_id].created_at_ms, 0)


async def test_its_promoter_brings_our_delayed_jobs(server: Server) -> None:
    view = QueueView(server, "q")
    async with open_producer(server.url) as producer:
        minted = await producer.add_in(0.3, {"n": 1})
        explicit = await producer.add_in_with_options(0.2, {"n": 2}, AddOptions(id="later", name="mail"))
        bulk = await producer.add_in_bulk(0.1, [{"n": number} for number in range(3, 53)])
        due = {job.id: score for job, (_, score) in zip(view.delayed_jobs(), view.delayed(), strict=True)}
        assert len(due) == 52
        async with chasquimq_worker(server.url) as worker:
            runs = await worker.lines(52)
            assert view.now_ms() >= max(due.values())
            await is_drained(view)
            # Its promoter deletes the index, and leaves the marker.
            await until(lambda: not [key for key in view.all_keys() if "didx" in key], "the indexes are gone")
        assert ":dlid:later" in view.all_keys()
        assert not (await producer.add_in_with_id("later", 5, 1)).is_new
    by_id = {run["id"]: run for run in runs}
    assert sorted(by_id) == sorted([minted, explicit, *bulk])
    assert (by_id["later"]["name"], by_id["later"]["data"]) == ("mail", {"n": 2})


async def test_it_obeys_our_retry_overrides(server: Server) -> None:
    view = QueueView(server, "q")
    async with open_producer(server.url) as producer:
        patient = await producer.add_with_options(
            {"fail": 4}, AddOptions(name="patient", retry=JobRetryOverride(5, QUICK))
        )
        async with chasquimq_worker(server.url, max_attempts=2) as worker:
            runs = await worker.lines(5)
            assert [(run["id"], run["attempt"], run["name"]) for run in runs] == [
                (patient, attempt, "patient") for attempt in range(5)
            ]
            await is_drained(view)
            hasty = await producer.add_with_options({"fail": 9}, AddOptions(retry=JobRetryOverride(1)))
            assert (await worker.line())["id"] == hasty
            (letter,) = await until(producer.peek_dlq, "the job is dead")
            assert (letter.reason, decode_job(letter.payload).id) == ("retries_exhausted", hasty)
            # Without an override the worker's own limit holds.
            plain = await producer.add_with_options({"fail": 9}, AddOptions(retry=JobRetryOverride(None, QUICK)))
            assert [run["id"] for run in await worker.lines(2)] == [plain] * 2


async def test_it_runs_its_dead_letters_that_we_replay(server: Server) -> None:
    view = QueueView(server, "q")
    async with open_producer(server.url) as producer:
        first = await producer.add_with_options({"give_up": True, "n": 1}, AddOptions(name="mail"))
        second = await producer.add({"fail": 1, "return": "second time"})
        async with chasquimq_worker(server.url, max_attempts=1, store_results=True) as worker:
            assert {run["id"] for run in await worker.lines(2)} == {first, second}
            await until(lambda: view.client.xlen(view.keys.dlq) == 2, "both are dead")
            letters = {letter.reason: letter for letter in await producer.peek_dlq()}
            assert decode_job(letters["unrecoverable"].payload).id == first
            assert letters["unrecoverable"].name == "mail"
            assert decode_job(letters["retries_exhausted"].payload).id == second
            moved = await producer.replay_dlq(reason="retries_exhausted")
            assert (moved, moved.skipped) == (1, 0)
            run = await worker.line()
            assert (run["id"], run["attempt"], run["data"]) == (second, 0, {"fail": 1, "return": "second time"})
            result = await until(lambda: producer.get_result(second), "its result is stored")
            assert decode_result(result) == "second time"
            assert await producer.remove_dlq(ids=[letters["unrecoverable"].dlq_id]) == 1
            await is_drained(view)


async def test_its_scheduler_fires_our_repeatables(server: Server) -> None:
    view = QueueView(server, "q")
    pattern = RepeatPattern.every(150)
    async with open_producer(server.url) as producer:
        key = await producer.upsert_repeatable(RepeatableSpec("tick", pattern, {"n": 1}).with_limit(4))
        far = await producer.ensure_repeatable(RepeatableSpec("far", RepeatPattern.cron("0 9 * * *"), None))
        async with chasquimq_worker(server.url) as worker:
            runs = await worker.lines(4)
            assert {(run["name"], run["data"]["n"]) for run in runs} == {("tick", 1)}
            assert len({run["id"] for run in runs}) == 4
            await until(lambda: not view.client.exists(view.keys.repeat_spec(key)), "its last fire removed it")
            assert [meta.key for meta in await producer.list_repeatable()] == [far]
            # Registered again it starts a new count.
            await producer.upsert_repeatable(RepeatableSpec("tick", pattern, {"n": 2}).with_limit(2))
            assert [run["data"]["n"] for run in await worker.lines(2)] == [2, 2]


async def test_finding_37_it_cannot_read_inline_payloads(server: Server) -> None:
    async with open_producer(server.url, payload_format="inline") as producer:
        await producer.add({"n": 1})
        async with chasquimq_worker(server.url):
            (letter,) = await until(producer.peek_dlq, "it gives the job up")
            assert letter.reason == "decode_failed"


# --- its queue


async def test_its_queue_finds_and_cancels_our_jobs(server: Server) -> None:
    view = QueueView(server, "q")
    async with open_producer(server.url) as producer, chasquimq_queue(server.url) as queue:
        await producer.add_in_with_id("later", 60, {"n": 1})
        assert await queue.call("cancel_delayed", "later") is True
        assert view.delayed() == []
        assert not {":dlid:later", ":didx:later"} & set(view.all_keys())
        assert (await producer.add_in_with_id("later", 60, {"n": 2})).is_new
        # Our marker also prevents its delayed adds with the same id.
        job = await queue.call("add_unique", "mail", {"n": 3}, job_id="later", delay_ms=60_000)
        assert job["id"] == "later"
        assert [job.payload for job in view.delayed_jobs()] == [{"n": 2}]
        # Generated ids have no index that it reads, as its own have none; ours cancels them.
        minted = await producer.add_in(60, {"n": 4})
        assert await queue.call("cancel_delayed", minted) is False
        assert minted in view.delayed_ids()
        assert await producer.cancel_delayed(minted) is True
        await producer.upsert_repeatable(RepeatableSpec("tick", RepeatPattern.every(60_000), {"n": 1}).with_limit(3))
        (meta,) = await queue.call("get_repeatable_jobs")
        assert meta["key"] == "tick::every:60000"
        assert meta["limit"] == 3
        assert await queue.call("remove_repeatable_by_key", "tick::every:60000") is True
        assert await producer.list_repeatable() == []


async def test_we_find_cancel_and_replay_its_jobs(server: Server) -> None:
    view = QueueView(server, "q")
    async with open_producer(server.url) as producer, chasquimq_queue(server.url) as queue:
        minted = await queue.call("add", "mail", {"n": 1}, delay_ms=60_000)
        explicit = await queue.call("add_unique", "mail", {"n": 2}, job_id="its", delay_ms=60_000)
        assert len(view.delayed()) == 2
        assert not (await producer.add_in_with_id("its", 60, {"n": 3})).is_new
        assert await producer.cancel_delayed(explicit["id"]) is True
        assert await producer.cancel_delayed(minted["id"]) is True  # it has no index: found by a search
        assert view.delayed() == []
        await queue.call("upsert_repeatable_job", "tick", {"n": 1}, every=60_000, limit=3)
        (meta,) = await producer.list_repeatable()
        assert (meta.key, meta.limit, meta.pattern) == ("tick::every:60000", 3, RepeatPattern.every(60_000))
        assert await producer.remove_repeatable(meta.key) is True
        assert await queue.call("get_repeatable_jobs") == []


async def test_dead_letters_are_the_same_for_both(server: Server) -> None:
    view = QueueView(server, "q")
    async with open_producer(server.url) as producer, chasquimq_queue(server.url) as queue:
        ours = await producer.add_with_options({"give_up": True}, AddOptions(name="mail"))
        its = (await queue.call("add", "print", {"give_up": True}))["id"]
        async with chasquimq_worker(server.url) as worker:
            assert {run["id"] for run in await worker.lines(2)} == {ours, its}
            await until(lambda: view.client.xlen(view.keys.dlq) == 2, "both are dead")
        seen: list[dict[str, Any]] = await queue.call("peek_dlq")
        ours_seen = await producer.peek_dlq()
        assert [letter["dlq_id"] for letter in seen] == [letter.dlq_id for letter in ours_seen]
        assert [letter["name"] for letter in seen] == [letter.name for letter in ours_seen]
        assert [letter["reason"] for letter in seen] == [letter.reason for letter in ours_seen]
        by_job = {decode_job(letter.payload).id: letter.dlq_id for letter in ours_seen}
        assert await producer.replay_dlq(ids=[by_job[its]]) == 1
        assert await queue.call("replay_dlq") == 1
        assert sorted(view.ids()) == sorted([ours, its])
        assert {job.attempt for job in view.jobs()} == {0}


async def test_it_ignores_options_behind_the_envelope(server: Server) -> None:
    """Also through its promoter, which moves our delayed members into the stream."""
    view = QueueView(server, "q")
    tail = encode_extras(JobExtras({"tenant": "acme"}, 1000, 2**50))
    async with open_producer(server.url) as producer:
        now = await producer.add_with_options({"n": 1}, TaskAddOptions(name="mail", _tail=tail))
        later = await producer.add_in_with_options(0.1, {"n": 2}, TaskAddOptions(name="mail", _tail=tail))
        assert [job.headers for job in view.jobs() + view.delayed_jobs()] == [{"tenant": "acme"}] * 2
        async with chasquimq_worker(server.url) as worker:
            runs = await worker.lines(2)
            await is_drained(view)
    assert [(run["id"], run["name"], run["data"]) for run in runs] == [
        (now, "mail", {"n": 1}),
        (later, "mail", {"n": 2}),
    ]
    assert view.dead_letters() == []
