"""Servers that restart, lose data, refuse writes, migrate slots or cut connections: workers recover and lose no job."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import redis

from consume.views import WorkerView
from consume.workers import QUEUE, Stuck, consuming, quick_config, reading_link, settling_link
from servers.process import free_port
from support.proxy import Proxy
from support.users import acl_user
from support.waiting import until
from tampu.consume.consumer import Consumer
from tampu.consume.handlers import UnrecoverableError
from tampu.errors import RedisError
from tampu.wire.envelope import decode_job
from tampu.wire.retry import JobRetryOverride

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.cluster import Cluster
    from servers.process import Server
    from support.troubles import Troubles
    from tampu.wire.job import Job

#: How long a server fault lasts, in seconds.
TROUBLE_SECS = 2.0


class Work:
    """A handler that counts runs: of ten jobs one always fails, one fails at first; successes store a result."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()

    async def __call__(self, job: Job[Any]) -> bytes:
        self.runs[job.id] += 1
        await asyncio.sleep(0.001)
        if job.payload % 10 == 3 or (job.payload % 10 == 7 and job.attempt == 0):
            raise ValueError("as planned")
        return b"done"


def ends_of(view: WorkerView) -> tuple[set[str], set[str]]:
    """Return the ids of jobs with a result, and those of dead letters."""
    found = view.client.scan_iter(view.keys.result("*"), count=1000)
    done = {key.decode().rpartition(":")[2] for key in found}
    return done, {decode_job(letter.payload).id for letter in view.dead_letters()}


# --- restart


@pytest.mark.servers
async def test_a_server_killed_under_load_loses_no_confirmed_job(
    server_kind: str, fresh_server: Callable[..., Any]
) -> None:
    server = fresh_server(server_kind, appendonly="yes", appendfsync="always")
    view = WorkerView(server, QUEUE)
    node = view.node
    work = Work()
    confirmed: list[str] = []

    async with consuming(server.url, work, store_results=True, max_attempts=2, claim_min_idle_ms=1000):
        for number in range(600):
            if number == 300:
                await until(lambda: len(work.runs) > 100, "it works")
                node.kill()
                node.start()
                if hasattr(server, "await_ok"):
                    await asyncio.to_thread(server.await_ok)
                view = WorkerView(server, QUEUE)
            confirmed.append(view.add(number, job_id=f"job-{number}"))
            if number % 20 == 0:
                await asyncio.sleep(0)
        await until(view.is_settled, "all are settled", 60)
    done, dead = ends_of(view)
    assert done | dead == set(confirmed)
    assert dead == {f"job-{number}" for number in range(3, 600, 10)}


async def test_a_restarted_server_keeps_other_clients_connections(fresh_server: Callable[..., Server]) -> None:
    """A restarted server assigns client IDs from 1 again: the lost connection's ID then belongs to another client."""
    server = fresh_server()
    view = WorkerView(server, QUEUE)
    async with Proxy(server.address) as proxy, consuming(proxy.url, Work()):
        await until(view.waiting_reads, "the worker reads")
        lost_id = max(int(one["id"]) for one in view.connections())
        proxy.shut()
        server.restart()
        strangers = [server.client() for _ in range(lost_id)]
        taken = {stranger.client_id() for stranger in strangers}
        assert lost_id in taken
        proxy.reopen()
        view = WorkerView(server, QUEUE)
        view.add(1)
        await until(view.is_settled, "the worker is back")
        assert {stranger.client_id() for stranger in strangers} == taken


# --- a server that loses its data


@pytest.mark.servers
@pytest.mark.parametrize("events", [True, False], ids=["events", "no-events"])
async def test_after_a_flush_the_group_is_created_again(view: WorkerView, events: bool) -> None:
    """Also for jobs that were running during the flush."""
    stuck = Stuck(only="waits")
    async with consuming(view.server.url, stuck, events_enabled=events, claim_min_idle_ms=300) as worker:
        before = view.add("waits")
        await stuck.runs()
        view.client.flushall()
        stuck.release.set()
        after = [view.add() for _ in range(5)]
        await until(lambda: set(after) <= set(stuck.started), "the jobs added since have run")
        await until(view.is_settled, "and settled")
        await until(lambda: worker.held == 0, "nothing is held on to")
    assert stuck.started.count(before) == 1


@pytest.mark.servers
async def test_a_failure_after_a_flush_is_dropped_with_its_entry(view: WorkerView) -> None:
    release = asyncio.Event()
    started: list[str] = []

    async def handler(job: Job[Any]) -> None:
        started.append(job.id)
        if job.payload == "waits":
            await release.wait()
            raise ValueError
        if job.payload == "dies":
            await release.wait()
            raise UnrecoverableError

    settings = {"claim_min_idle_ms": 60_000, "retry_inflight": 1, "dlq_inflight": 1}
    async with consuming(view.server.url, handler, **settings) as worker:
        view.add("waits")
        view.add("dies")
        await until(lambda: len(started) == 2, "both run")
        view.client.flushall()
        release.set()
        after = view.add()
        await until(lambda: after in started and view.is_settled(), "the jobs added since are settled")
        await until(lambda: worker.running == 0, "no handler waits for room")
        await until(lambda: worker.held == 0, "nothing is held on to")
        assert not view.dead_letters()
        # Each kind of failure has room for one: dropped outcomes must not take it up.
        view.add("waits", job_id="retried")
        view.add("dies", job_id="dead")
        await until(lambda: started.count("retried") > 1, "a later failure is retried")
        (letter,) = await until(view.dead_letters, "and another one dead-lettered")
        assert decode_job(letter.payload).id == "dead"


@pytest.mark.servers
async def test_a_deleted_group_or_stream_is_created_again(view: WorkerView) -> None:
    done: list[str] = []

    async def handler(job: Job[Any]) -> None:
        done.append(job.id)

    async with consuming(view.server.url, handler, group="crew"):
        await until(lambda: view.client.exists(view.keys.stream) and view.groups() == ["crew"], "the group exists")
        view.client.delete(view.keys.stream)
        first = view.add()
        await until(lambda: first in done, "a job in a new stream is run")
        view.client.xgroup_destroy(view.keys.stream, "crew")
        second = view.add()
        await until(lambda: second in done, "a job under a new group is run")
        await until(lambda: view.length() == 0, "all are settled")


@pytest.mark.servers
async def test_a_script_flush_does_not_stop_a_worker(view: WorkerView) -> None:
    work = Work()
    async with consuming(view.server.url, work, store_results=True, max_attempts=2):
        view.add_many(list(range(50)))
        await until(lambda: len(work.runs) == 50 and view.is_settled(), "all are settled")
        view.node.client().script_flush()
        view.add_many(list(range(50)))
        await until(lambda: len(work.runs) == 100 and view.is_settled(), "so are those after the flush")
    done, dead = ends_of(view)
    assert len(done | dead) == 100
    assert len(dead) == 10


# --- a server that refuses for a while


@pytest.mark.servers("valkey", "redis62")
async def test_two_seconds_without_memory_lose_no_job_and_no_result(
    view: WorkerView, caplog: pytest.LogCaptureFixture
) -> None:
    """Findings 9 and 12."""
    work = Work()
    node = view.node
    async with consuming(view.server.url, work, store_results=True, max_attempts=2, events_enabled=True):
        ids = view.add_many(list(range(300)))
        await until(lambda: len(work.runs) > 30, "it works")
        node.config_set(maxmemory=1)
        with pytest.raises(redis.OutOfMemoryError):
            view.client.set(view.keys.result("probe"), "x")
        await asyncio.sleep(TROUBLE_SECS)  # the server has no memory
        node.config_set(maxmemory=0)
        await until(view.is_settled, "all are settled")
    done, dead = ends_of(view)
    assert done | dead == set(ids)
    assert len(dead) == 30
    assert not done & dead
    assert max(work.runs.values()) <= 2
    # Redis below 7 cannot settle without memory; two lines of the script fail in turn.
    assert caplog.text.count("could not write part of a settle window") == (view.server.kind == "redis62")


@pytest.mark.servers("valkey", "redis62", "redis70", "redis86")
async def test_two_seconds_as_a_replica_lose_no_job(view: WorkerView) -> None:
    """READONLY. (A Cluster node cannot be turned into a replica by hand; tests/redis tests its failovers.)"""
    work = Work()
    node = view.node
    async with consuming(view.server.url, work, store_results=True, max_attempts=2, claim_min_idle_ms=1000):
        ids = view.add_many(list(range(300)))
        await until(lambda: len(work.runs) > 30, "it works")
        node.client().execute_command("REPLICAOF", "127.0.0.1", free_port())
        try:
            await asyncio.sleep(TROUBLE_SECS)  # the server is a replica
        finally:
            node.client().execute_command("REPLICAOF", "NO", "ONE")
        await until(view.is_settled, "all are settled")
    done, dead = ends_of(view)
    assert done | dead == set(ids)
    assert len(dead) == 30


@pytest.mark.servers
async def test_a_worker_starts_without_memory_if_its_group_exists(view: WorkerView) -> None:
    """Finding 12: draining the queue is what frees memory."""
    done: list[str] = []

    async def handler(job: Job[Any]) -> None:
        done.append(job.id)

    view.client.xgroup_create(view.keys.stream, "default", "0", mkstream=True)
    view.add_many([None] * 10)
    node = view.node
    node.config_set(maxmemory=1)
    async with consuming(view.server.url, handler, delayed_enabled=False):
        await until(lambda: len(done) == 10 and view.length() == 0, "all are done without memory")
        node.config_set(maxmemory=0)


@pytest.mark.servers
async def test_a_worker_waits_for_the_memory_to_create_its_group(view: WorkerView) -> None:
    """Finding 12."""
    done: list[str] = []

    async def handler(job: Job[Any]) -> None:
        done.append(job.id)

    job_id = view.add()
    node = view.node
    node.config_set(maxmemory=1)
    async with consuming(view.server.url, handler) as worker:
        await until(view.connections, "it is connected")
        await asyncio.sleep(0.3)  # it tries
        assert not worker.task.done()
        assert not done
        node.config_set(maxmemory=0)
        await until(lambda: done == [job_id], "it works once there is memory")


async def test_a_worker_that_waits_for_its_server_can_be_stopped(view: WorkerView) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    shutdown = asyncio.Event()
    task = asyncio.create_task(Consumer(url, quick_config()).run(lambda job: None, shutdown))
    await asyncio.sleep(0.2)  # it tries to connect
    assert not task.done()
    shutdown.set()
    await asyncio.wait_for(task, 3)


@pytest.mark.parametrize("login", ["", "ada:pw@"])
async def test_a_worker_waits_for_a_server_with_too_many_clients(
    fresh_server: Callable[..., Server], login: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tampu.consume.link.CONNECT_WARNING_SECS", 0.5)
    server = fresh_server()
    view = WorkerView(server, QUEUE)
    ran: list[str] = []

    async def handler(job: Job[Any]) -> None:
        ran.append(job.id)

    with acl_user(server, "ada", "pw"):
        job_id = view.add(1)
        refused = view.client.info("stats")["rejected_connections"]
        view.client.config_set("maxclients", 1)  # it keeps the connections it has
        async with consuming(server.url.replace("redis://", f"redis://{login}"), handler) as worker:
            await until(lambda: view.client.info("stats")["rejected_connections"] > refused + 3, "it has tried")
            await until(lambda: "retrying" in caplog.text, "it says so")
            assert caplog.text.count("ERR max number of clients reached (raise its maxclients") == 1
            assert not worker.task.done()
            view.client.config_set("maxclients", 100)
            await until(lambda: ran == [job_id], "the job runs")


async def test_a_wrong_password_raises_at_once(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server(requirepass="secret")
    consumer = Consumer(server.url.replace("secret", "wrong"), quick_config())
    with pytest.raises(RedisError, match="WRONGPASS"):
        await asyncio.wait_for(consumer.run(lambda job: None, asyncio.Event()), 10)


# --- a server that refuses some commands for good


@pytest.mark.servers
async def test_a_user_without_zadd_loses_no_job_and_delays_no_other(view: WorkerView, troubles: Troubles) -> None:
    attempts: list[int] = []

    async def handler(job: Job[Any]) -> None:
        if job.payload == "fails":
            attempts.append(job.attempt)
            raise ValueError

    nodes = getattr(view.server, "nodes", [view.server])
    users = [acl_user(node, "ada", "pw", "~*", "+@all", "-zadd") for node in nodes]
    url = view.server.url.replace("://", "://ada:pw@")
    with contextlib.ExitStack() as stack:
        for user in users:
            stack.enter_context(user)
        async with consuming(url, handler, claim_min_idle_ms=300, max_attempts=2, delayed_enabled=False):
            view.add("fails")
            await until(lambda: troubles.about("could not write part of"), "its retry cannot be written")
            others = [view.add() for _ in range(20)]
            await until(lambda: view.length() == 1, "others are done")
            idle = [entry["time_since_delivered"] for entry in view.pending()]
            await asyncio.sleep(0.6)  # longer than a lease lasts
            assert len(view.pending()) == len(idle) == 1, "it is still pending"
            assert attempts == [0], "and it was not run again"
            for node in nodes:
                node.client().execute_command("ACL", "SETUSER", "ada", "+zadd")
            await until(view.delayed, "it is written once allowed")
        completed = {event["id"] for event in view.events() if event["e"] == "completed"}
        assert completed == set(others)


@pytest.mark.servers
@pytest.mark.parametrize("key", ["dlq", "delayed", "events"])
async def test_a_key_of_the_wrong_type_loses_no_job_and_delays_no_other(
    view: WorkerView, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Finding 8."""
    runs: Counter[str] = Counter()

    async def handler(job: Job[Any]) -> None:
        runs[job.payload] += 1
        if job.payload == "dies":
            raise UnrecoverableError
        if job.payload == "fails" and job.attempt == 0:
            raise ValueError

    name = getattr(view.keys, key)
    view.client.set(name, "wrong type")
    view.add("dies")
    view.add("fails")
    view.add_many(["fine"] * 20)
    async with consuming(view.server.url, handler, claim_min_idle_ms=300):
        left = {"dlq": 1, "delayed": 1, "events": 0}[key]
        await until(lambda: runs["fine"] == 20 and view.length() == left, "the others are done")
        if left:
            await asyncio.sleep(0.5)  # longer than a lease lasts
            assert len(view.pending()) == 1
        await until(lambda: "WRONGTYPE" in caplog.text, "the log says so")
        said = [message for message in caplog.messages if "settle window: WRONGTYPE" in message]
        assert len(said) == 1, "logged once, not at every attempt"
        view.client.delete(name)
        await until(lambda: runs["fails"] == 2 and view.length() == 0 and not view.pending(), "all are settled")
    assert runs == {"dies": 1, "fails": 2, "fine": 20}
    assert len(view.dead_letters()) == 1


@pytest.mark.servers
async def test_an_unknown_second_group_does_not_keep_entries_in_the_stream(view: WorkerView) -> None:
    """Finding 36."""
    done: list[str] = []

    async def handler(job: Job[Any]) -> None:
        done.append(job.id)
        if job.payload == 3 and job.attempt == 0:
            raise ValueError

    view.client.xgroup_create(view.keys.stream, "stray", "0", mkstream=True)
    view.add_many(list(range(5)))
    view.client.xreadgroup("stray", "stray-1", {view.keys.stream: ">"}, count=3)
    async with consuming(view.server.url, handler):
        await until(
            lambda: len(done) == 6 and view.length() == 0,
            "the stream is empty although the other group never acknowledged",
        )
    assert sorted(view.groups()) == ["default", "stray"]


@pytest.mark.servers
async def test_entries_deleted_while_pending_leave_the_pending_list(view: WorkerView) -> None:
    """Finding 2."""
    view.client.xgroup_create(view.keys.stream, "default", "0", mkstream=True)
    view.add_many([None] * 5)
    view.client.xreadgroup("default", "dead", {view.keys.stream: ">"})
    first, second, *_ = (entry["message_id"] for entry in view.pending())
    view.client.xdel(view.keys.stream, first, second)
    view.client.xtrim(view.keys.stream, maxlen=2, approximate=False)
    assert len(view.pending()) == 5
    done: list[int] = []

    async def handler(job: Job[Any]) -> None:
        done.append(job.attempt)

    async with consuming(view.server.url, handler, claim_min_idle_ms=200):
        await until(lambda: not view.pending(), "the pending list is empty")
        await until(view.is_settled, "nothing is left")
    assert done == [0, 0]


@pytest.mark.servers
async def test_an_entry_deleted_while_it_runs_leaves_nothing_pending(view: WorkerView) -> None:
    release = asyncio.Event()

    async def handler(job: Job[Any]) -> None:
        await release.wait()

    async with consuming(view.server.url, handler, claim_min_idle_ms=200) as worker:
        view.add()
        (entry,) = await until(view.pending, "it runs")
        view.client.xdel(view.keys.stream, entry["message_id"])
        release.set()
        await until(lambda: not view.pending() and worker.held == 0, "nothing is left")


# --- a Cluster that migrates a slot


async def test_a_migrating_cluster_slot_loses_no_job(fresh_server: Callable[..., Cluster]) -> None:
    cluster = fresh_server("cluster86")
    view = WorkerView(cluster, QUEUE)
    source = cluster.node_of(view.keys.tag)
    target = next(node for node in cluster.masters if node is not source)
    slot = source.client().execute_command("CLUSTER KEYSLOT", view.keys.tag)
    source_id, target_id = (node.client().execute_command("CLUSTER MYID").decode() for node in (source, target))
    work = Work()
    async with consuming(cluster.url, work, store_results=True, max_attempts=2, claim_min_idle_ms=2000):
        added = view.add_many(list(range(400)))
        await until(lambda: len(work.runs) > 50, "it works")
        target.client().execute_command("CLUSTER SETSLOT", slot, "IMPORTING", source_id)
        source.client().execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target_id)
        moved = 0
        while keys := source.client().execute_command("CLUSTER GETKEYSINSLOT", slot, 3):
            source.client().execute_command("MIGRATE", *target.address, "", 0, 5000, "KEYS", *keys)
            moved += len(keys)
            await asyncio.sleep(0.02)
        for node in cluster.masters:
            node.client().execute_command("CLUSTER SETSLOT", slot, "NODE", target_id)
        view = WorkerView(cluster, QUEUE)
        added += [view.add(number, job_id=f"late-{number}") for number in range(20)]
        await until(view.is_settled, "all are settled", 60)
    done, dead = ends_of(view)
    assert moved > 3
    assert done | dead == set(added)
    assert len(dead) == 42
    assert target.client().execute_command("CLUSTER COUNTKEYSINSLOT", slot) > len(done)


async def test_a_read_that_follows_ask_survives_the_loss_of_its_connection(
    fresh_server: Callable[..., Cluster], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = fresh_server("cluster86")
    view = WorkerView(cluster, QUEUE)
    source = cluster.node_of(view.keys.tag)
    target = next(node for node in cluster.masters if node is not source)
    work = Work()
    async with consuming(cluster.url, work):
        await until(lambda: view.client.exists(view.keys.stream), "it has made its group")
        slot = source.client().execute_command("CLUSTER KEYSLOT", view.keys.tag)
        source_id, target_id = (node.client().execute_command("CLUSTER MYID").decode() for node in (source, target))
        target.client().execute_command("CLUSTER SETSLOT", slot, "IMPORTING", source_id)
        source.client().execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target_id)
        keys = source.client().execute_command("CLUSTER GETKEYSINSLOT", slot, 100)
        source.client().execute_command("MIGRATE", *target.address, "", 0, 5000, "KEYS", *keys)

        def readers(node: Server) -> list[str]:
            return [one["id"] for one in node.client().client_list() if one["cmd"] == "xreadgroup"]

        on_source = await until(lambda: readers(source), "it reads")
        for _ in range(3):
            [blocked] = await until(lambda: readers(target), "it reads from the other node")
            target.client().client_kill_filter(_id=blocked)
            await until(lambda: readers(target) not in ([], [blocked]), "it reads again")  # noqa: B023
        assert readers(source) == on_source  # it still has its own connection
        for node in cluster.masters:
            node.client().execute_command("CLUSTER SETSLOT", slot, "NODE", target_id)
        added = WorkerView(cluster, QUEUE).add(0)
        await until(lambda: added in work.runs, "the job runs")
    assert "TypeError" not in caplog.text


# --- lost replies


@pytest.mark.servers("valkey", "redis86")
@pytest.mark.parametrize("events", [True, False], ids=["events", "no-events"])
async def test_a_settle_window_resent_after_a_lost_reply_is_written_once(view: WorkerView, events: bool) -> None:
    runs: Counter[str] = Counter()
    release = asyncio.Event()

    async def handler(job: Job[Any]) -> bytes | None:
        runs[job.id] += 1
        await release.wait()
        if job.payload == "fails":
            raise ValueError
        if job.payload == "dies":
            raise UnrecoverableError
        return b"done" if job.payload == "returns" else None

    async with Proxy(view.server.address) as proxy:
        settings = {"delayed_enabled": False, "events_enabled": events, "store_results": True, "ack_idle_ms": 20}
        async with consuming(proxy.url, handler, **settings) as worker:
            payloads = ["fails", "dies", "returns", "fine"] if events else ["fine"] * 4
            ids = [view.add(payload, job_id=payload if events else None) for payload in payloads]
            await until(lambda: sum(runs.values()) == 4, "all run")
            settling = await settling_link(proxy)
            settling.replies_held = True
            release.set()
            await until(lambda: view.length() == 0, "the server has written the window")
            settling.cut()
            await until(lambda: worker.held == 0, "the worker has sent it again and got the reply")
    assert runs == dict.fromkeys(ids, 1)
    if events:
        assert [job.id for job in view.delayed_jobs()] == ["fails"]
        assert [decode_job(letter.payload).id for letter in view.dead_letters()] == ["dies"]
        assert view.result("returns") == b"done"
        counts = Counter((event["e"], event["id"]) for event in view.events() if event["e"] != "drained")
        assert set(counts.values()) == {1}


@pytest.mark.servers("valkey", "redis86")
async def test_a_window_that_never_arrived_is_sent_again(view: WorkerView) -> None:
    runs: list[str] = []

    async def handler(job: Job[Any]) -> None:
        runs.append(job.id)
        settling.requests_held = True

    async with Proxy(view.server.address) as proxy, consuming(proxy.url, handler, delayed_enabled=False) as worker:
        settling = await settling_link(proxy)
        job_id = view.add()
        await until(lambda: any(job_id.encode() in call for call in settling.calls), "its outcome is sent")
        settling.cut()
        await until(lambda: "completed" in view.event_names(job_id), "it is settled")
        await until(lambda: worker.held == 0, "the worker has got the reply")
    assert runs == [job_id]


@pytest.mark.servers("valkey", "redis86")
async def test_entries_in_a_lost_reply_are_handed_back_as_never_run(view: WorkerView) -> None:
    """Left until its lease expires, a job with one attempt would become a dead letter without a run."""
    attempts: list[int] = []

    async def handler(job: Job[Any]) -> None:
        attempts.append(job.attempt)

    settings = {"delayed_enabled": False, "claim_min_idle_ms": 60_000}
    async with Proxy(view.server.address) as proxy, consuming(proxy.url, handler, **settings):
        reading = await reading_link(proxy)
        reading.replies_held = True
        view.add(retry=JobRetryOverride(1))
        await until(view.pending, "the server has delivered it")
        reading.cut()
        await until(lambda: attempts == [0], "it runs as a first delivery")
        await until(view.is_settled, "and is settled")
    assert not view.dead_letters()


async def test_a_worker_with_one_slot_reads_right_after_a_reconnect(view: WorkerView) -> None:
    """It delays takeovers for a grace period, but not new jobs."""
    done: list[str] = []

    async def handler(job: Job[Any]) -> None:
        done.append(job.id)

    settings = {"concurrency": 1, "claim_min_idle_ms": 3000, "delayed_enabled": False, "block_ms": 50}
    async with Proxy(view.server.address) as proxy, consuming(proxy.url, handler, **settings):
        await reading_link(proxy)
        proxy.shut()
        await until(lambda: view.waiting_reads() == 0, "the server has noticed")
        # An entry of a worker that died long ago.
        idle = view.add()
        ((_, [(entry_id, _)]),) = view.client.xreadgroup("default", "dead", {view.keys.stream: ">"})
        view.client.xclaim(view.keys.stream, "default", "dead", 0, [entry_id], idle=60_000)
        proxy.reopen()
        await reading_link(proxy)
        reads_again_at = time.monotonic()
        quick = view.add()
        while idle not in done:
            await until(lambda job_id=quick: job_id in done, "the job starts", 1)
            quick = view.add()
        assert time.monotonic() - reads_again_at > 1.5, "the takeover had to wait"


async def test_a_server_that_hangs_for_a_while_loses_no_job(fresh_server: Callable[..., Server]) -> None:
    """Its connections stay open, but it sends no replies."""
    server = fresh_server()
    view = WorkerView(server, QUEUE)
    work = Work()
    async with consuming(server.url, work, store_results=True, max_attempts=2, claim_min_idle_ms=500):
        ids = view.add_many(list(range(200)))
        await until(lambda: len(work.runs) > 20, "it works")
        server.pause()
        await asyncio.sleep(1.5)  # it hangs
        server.resume()
        await until(view.is_settled, "all are settled")
    done, dead = ends_of(view)
    assert done | dead == set(ids)
    assert max(work.runs.values()) <= 2
