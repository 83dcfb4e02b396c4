"""`tampu doctor` finds every problem and says how to fix it; a healthy server has none."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import pytest

from cli.lab import invoke
from cli.shop import QUEUE, Filled, fill
from support.users import acl_user
from support.waiting import until
from tampu import Queue, Worker
from tampu.base.clock import wall_clock_ms
from tampu.cli.commands import doctor as checks
from tampu.cli.commands.doctor_queues import Level
from tampu.redis.scripts import Capabilities
from tampu.wire.heartbeat import KEPT_MS, Heartbeat, RunningJob
from tampu.wire.limits import CLOSED

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.process import Server


def faults(*options: str) -> dict[str, dict[str, Any]]:
    """Return the problems by the name of their check."""
    done = invoke("doctor", *options, "--json")
    found = {one["check"]: one for one in done.json["findings"] if one["level"] == "wrong"}
    assert done.code == (3 if found else 0)
    assert done.json["healthy"] is not bool(found)
    assert all(one["remedy"] for one in found.values())
    return found


def test_a_healthy_server_is_exit_code_0(fresh_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    server = fresh_server(appendonly="yes")
    monkeypatch.setenv("TAMPU_URL", server.url)
    fill(server.url)
    assert faults()["workers"]["text"] == "1 job and no live worker"
    invoke("queue", "purge", QUEUE, "--yes")
    assert faults() == {}
    text = invoke("doctor").out
    assert "no problems found" in text
    for check in ("version", "capabilities", "eviction policy", "persistence", "memory", "clock", "replication"):
        assert check in text
    assert "2 dead letters" in text
    assert f"tampu dlq peek {QUEUE}" in text


def test_problems_of_the_server_are_found(server: Server, shop: Filled) -> None:
    server.config_set(maxmemory="1gb", maxmemory_policy="allkeys-lru")
    found = faults()
    assert "allkeys-lru" in found["eviction policy"]["text"]
    assert "noeviction" in found["eviction policy"]["remedy"]
    assert "a restart loses every job" in found["persistence"]["text"]
    server.config_set(maxmemory=server.client().info("memory")["used_memory"], maxmemory_policy="noeviction")
    assert "maxmemory" in faults()["memory"]["text"]
    text = invoke("doctor").out
    assert "problems found" in text
    assert "→ raise maxmemory" in text


def test_problems_of_a_queue_are_found(server: Server, url: str) -> None:
    client = server.client()
    tag = "{chasqui:sick}"

    async def break_it() -> None:
        async with Queue("sick", url=url) as queue:
            await queue.add("x", 1)
            await queue.add("x", 2)

    asyncio.run(break_it())
    client.xgroup_create(f"{tag}:stream", "default", id="0")
    client.xgroup_create(f"{tag}:stream", "spies", id="0")
    client.xreadgroup("default", "dead", {f"{tag}:stream": ">"}, count=1)
    client.zadd(f"{tag}:delayed", {b"\xff\xff\xff\xff": 1000})
    client.zadd(f"{tag}:repeat", {"never fired": 1000})
    client.set(f"{tag}:result:x", b"\xc0")
    client.set(f"{tag}:promoter:lock", "gone")
    found = faults("sick", "--max-age", "0ms", "--claim-after", "0ms")
    assert "2 groups (default, spies)" in found["groups"]["text"]
    assert "1 job held by dead" in found["stalled"]["text"]
    assert "cannot be decoded" in found["poison"]["text"]
    assert "2 keys" in found["keys without TTL"]["text"]
    assert "overdue" in found["delayed"]["text"]
    assert "no scheduler is running" in found["repeatables"]["text"]
    assert "waiting, the oldest for" in found["lag"]["text"]


def test_a_key_of_another_type_is_found(server: Server, url: str) -> None:
    server.client().set("{chasqui:odd}:stream", "x")
    found = faults("odd")
    assert "{chasqui:odd}:stream is a string, not a stream" in found["type of keys"]["text"]


def test_a_paused_queue_is_a_note_and_not_a_problem(shop: Filled) -> None:
    invoke("queue", "pause", QUEUE)
    told = invoke("doctor", QUEUE, "--max-age", "0ms", "--json").json
    assert [one["level"] for one in told["findings"] if one["check"] == "paused"] == ["note"]
    assert "lag" not in faults(QUEUE, "--max-age", "0ms")


def test_a_replica_is_found(fresh_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    master = fresh_server()
    replica = fresh_server(replicaof=master)
    monkeypatch.setenv("TAMPU_URL", replica.url)
    assert "this is a replica" in faults()["replication"]["text"]


@pytest.mark.servers("redis86")
def test_chasquimq_producers_are_reported(server: Server, url: str) -> None:
    server.client().execute_command("XADD", "{chasqui:q}:stream", "IDMP", "p", "i", "*", "d", "x")
    told = invoke("doctor", "q", "--json").json
    [peer] = [one for one in told["findings"] if one["check"] == "peers"]
    assert peer["level"] == "note"
    assert "trimmed at the MAXLEN of 1 ChasquiMQ producer (XADD IDMP)" in peer["text"]


# --- checks of the server's replies


@pytest.mark.parametrize(
    ("info", "level"),
    [
        ({"redis_version": "7.2.4"}, Level.OK),
        ({"redis_version": "6.2.0"}, Level.OK),
        ({"redis_version": "6.0.16"}, Level.WRONG),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.0"}, Level.OK),
        ({}, Level.WRONG),
    ],
)
def test_versions(info: dict[str, str], level: Level) -> None:
    assert checks.version(info).level is level


@pytest.mark.parametrize(
    ("info", "save", "level"),
    [
        ({"aof_enabled": "1"}, "", Level.OK),
        ({"aof_enabled": "1", "aof_last_write_status": "err"}, "", Level.WRONG),
        ({"aof_enabled": "0"}, "", Level.WRONG),
        ({"aof_enabled": "0"}, "3600 1", Level.NOTE),
        ({"aof_enabled": "0"}, None, Level.NOTE),
        ({"aof_enabled": "0", "rdb_last_bgsave_status": "err"}, "3600 1", Level.WRONG),
    ],
)
def test_persistence(info: dict[str, str], save: str | None, level: Level) -> None:
    assert checks.persistence(info, save).level is level


@pytest.mark.parametrize(
    ("info", "level"),
    [
        ({"used_memory": "100", "maxmemory": "1000"}, Level.OK),
        ({"used_memory": "900", "maxmemory": "1000"}, Level.WRONG),
        ({"used_memory": "900", "maxmemory": "0", "total_system_memory": "1000"}, Level.WRONG),
        ({"used_memory": "100", "maxmemory": "0", "total_system_memory": "1000"}, Level.OK),
        ({}, Level.OK),
    ],
)
def test_memory(info: dict[str, str], level: Level) -> None:
    assert checks.memory(info).level is level


@pytest.mark.parametrize(
    ("ahead_ms", "level"), [(0, Level.OK), (-999, Level.OK), (1500, Level.WRONG), (-1500, Level.WRONG)]
)
def test_clocks(ahead_ms: float, level: Level) -> None:
    assert checks.clock(ahead_ms).level is level


@pytest.mark.parametrize(
    ("info", "level"),
    [
        ({"role": "master"}, Level.NOTE),
        ({"role": "master", "slave0": "ip=1.2.3.4,port=6379,state=online,offset=1,lag=0"}, Level.OK),
        ({"role": "master", "slave0": "ip=1.2.3.4,port=6379,state=online,offset=1,lag=60"}, Level.WRONG),
        ({"role": "master", "slave0": "ip=1.2.3.4,port=6379,state=wait_bgsave,offset=1,lag=0"}, Level.WRONG),
        ({"role": "slave", "master_link_status": "up"}, Level.WRONG),
    ],
)
def test_replication(info: dict[str, str], level: Level) -> None:
    assert checks.replication(info).level == level


def test_capabilities_are_named() -> None:
    assert "XACKDEL" in checks.capability(Capabilities(True, True, True)).text
    assert checks.capability(Capabilities(False, False, False)).level is Level.NOTE


def test_a_command_that_the_user_may_not_run_is_not_reported_as_emulated() -> None:
    found = checks.capability(Capabilities(False, False, False, frozenset({"xackdel", "script_flags"})))
    assert found.level is Level.OK
    assert found.text == (
        "native: none; emulated by scripts: XREADGROUP CLAIM; "
        "not checked, because this user may not run them: XACKDEL, script flags"
    )


@pytest.mark.parametrize(("timeout", "found"), [("0", 0), ("10", 1), ("3600", 0), (None, 0)])
def test_idle_timeouts(timeout: str | None, found: int) -> None:
    assert len(checks.idle_timeout(timeout)) == found


async def findings_of(check: str) -> list[dict[str, Any]]:
    """Run `doctor` beside the event loop's worker, and return its findings of one check."""
    done = await asyncio.to_thread(invoke, "doctor", "--json")
    return [one for one in done.json["findings"] if one["check"] == check]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "about", "text", "remedy"),
    [
        (
            {},
            "quiet",
            "1 job waiting and no free slot in 1 worker: its jobs use 0, jobs of other queues 2",
            "--reserve",
        ),
        ({}, "busy", "2 jobs waiting and no free slot in 1 worker: its own jobs use all 2", "--concurrency"),
        (
            {"limit": {"busy": 1}},
            "busy",
            "3 jobs waiting and no free slot in 1 worker: the queue uses its limit of 1 slot",
            "--limit",
        ),
    ],
)
async def test_jobs_that_wait_because_the_worker_is_full_are_found(
    url: str, settings: dict[str, Any], about: str, text: str, remedy: str
) -> None:
    release = asyncio.Event()
    queues = [Queue(name, url=url) for name in ("busy", "quiet")]
    for queue in queues:
        queue.task(name="wait")(release.wait)
    async with queues[0], queues[1], Worker(queues, concurrency=2, **settings) as worker:
        for _ in range(4):
            await queues[0].add("wait", {})
        await until(lambda: worker.slots_used["busy"] == 2 - len(settings), "it is full")
        if about == "quiet":
            await queues[1].add("wait", {})

        async def found() -> dict[str, Any] | None:
            return next((one for one in await findings_of("slots") if one["about"] == about), None)

        finding = await until(found, "a heartbeat has said so")
        release.set()
    assert finding["text"] == text
    assert remedy in finding["remedy"]


@pytest.mark.slow
async def test_a_worker_that_cannot_read_a_queue_is_found(server: Server, url: str) -> None:
    with acl_user(server, "blind", "pw", "~*", "+@all", "-xreadgroup"):
        queue = Queue("hidden", url=url.replace("redis://", "redis://blind:pw@"))
        queue.task(name="sleep")(asyncio.sleep)
        async with queue, Worker(queue, consumer_id="w1"):
            [finding] = await until(lambda: findings_of("reads"), "a heartbeat has said so")
    assert finding["level"] == "wrong"
    assert re.fullmatch("worker w1:[0-9a-f]{6} cannot read this queue", finding["text"])
    assert "ACL" in finding["remedy"]


async def test_workers_of_other_versions_are_named(server: Server, url: str) -> None:
    queue = Queue("mixed", url=url)
    queue.task(name="sleep")(asyncio.sleep)
    async with queue, Worker(queue):
        stream = "{chasqui:mixed}:stream"

        def has_joined() -> bool:
            groups = server.client().xinfo_groups(stream) if server.client().exists(stream) else []
            return bool(groups) and bool(server.client().keys("{chasqui:mixed}:worker:default:*"))

        await until(has_joined, "the worker has created the group and sent a heartbeat")
        assert await findings_of("peers") == []
        server.client().xreadgroup("default", "peer-7", {stream: ">"}, count=1)
        [finding] = await findings_of("peers")
    assert (finding["level"], finding["about"]) == ("note", "mixed")
    assert finding["text"] == "1 worker of ChasquiMQ or tampu 0.1.0: peer-7"


async def test_a_handler_that_has_run_for_ten_minutes_is_named(server: Server, url: str) -> None:
    async with Queue("slow", url=url) as queue:
        client = server.client()
        client.xgroup_create(queue.keys.stream, "default", mkstream=True)
        for worker, running_ms in (("w1", 600_000), ("w2", 599_999)):
            running = [RunningJob(f"job-of-{worker}", "charge", running_ms, 1)]
            beat = Heartbeat("host", 7, "0.2.0", 10, wall_clock_ms(), 1, 1, running)
            client.xgroup_createconsumer(queue.keys.stream, "default", worker)
            client.set(queue.keys.heartbeat("default", worker), beat.encode(), px=KEPT_MS)
        [finding] = await findings_of("long-running")
    assert finding["text"] == "charge job-of-w1 has been running for 10 min on w1"
    assert "tampu cancel slow job-of-w1" in finding["remedy"]


async def test_workers_without_limits_are_named(server: Server, url: str) -> None:
    queue = Queue("limited", url=url)
    queue.task(name="sleep")(asyncio.sleep)
    await queue.limit(concurrency=1)
    async with queue, Worker(queue):

        def is_closed() -> bool:
            groups = (
                server.client().xinfo_groups(queue.keys.stream) if server.client().exists(queue.keys.stream) else []
            )
            return bool(groups) and groups[0]["last-delivered-id"] == CLOSED.encode()

        await until(is_closed, "the worker takes jobs through the gate")
        assert await findings_of("limits") == []
        server.client().xreadgroup("default", "peer-7", {queue.keys.stream: ">"}, count=1)
        [finding] = await findings_of("limits")
        assert (finding["level"], finding["about"]) == ("wrong", "limited")
        assert finding["text"] == "1 worker without limits: peer-7; they get no jobs of this queue"
        shown = await asyncio.to_thread(invoke, "inspect", "limited")
        assert "limited: `tampu limit show limited` shows how" in shown.out
