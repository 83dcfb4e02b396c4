"""The ACL rules of each role allow all that the role does, and nothing that would harm others."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import redis

from cli.lab import invoke
from support.users import acl_user, nodes_of
from support.waiting import until
from tampu import JobCancelled, JobFailed, Queue, Worker, current_job
from tampu.errors import ConfigError, RedisError
from tampu.redis.acl import OPTIONAL, READ_ONLY, ROLES, Role, acl_line, acl_rules

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from servers.cluster import Cluster
    from servers.process import Server

pytestmark = pytest.mark.servers

#: Commands that no role may run.
FORBIDDEN = [
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("SWAPDB", 0, 1),
    ("SHUTDOWN", "NOSAVE"),
    ("CONFIG", "SET", "maxmemory", "1"),
    ("CONFIG", "GET", "requirepass"),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("CLIENT", "LIST"),
    ("ACL", "LIST"),
    ("KEYS", "*"),
    ("MONITOR",),
    ("REPLICAOF", "NO", "ONE"),
    ("PUBLISH", "c", "m"),
    ("GET", "another:key"),
    ("GET", "{chasqui:other}:paused"),
]


def lacks(server: Server | Cluster) -> set[str]:
    lacking = set()
    for name in OPTIONAL:
        try:
            with acl_user(server, "probe", "pw", f"+{name}"):
                pass
        except redis.ResponseError:
            lacking.add(name)
    return lacking


@contextlib.contextmanager
def user(server: Server | Cluster, role: Role, queue: str | None = "q") -> Iterator[str]:
    """Create a user with the rules of a role, and yield its URL; nothing may have been denied in the end."""
    clients: list[Any] = [node.client() for node in nodes_of(server)]
    rules = acl_rules(role, queue, lacks=lacks(server), read_keys=server.version >= "7")
    with acl_user(server, role, "pw", *rules):
        for client in clients:
            client.acl_log_reset()
        yield server.url.replace("://", f"://{role}:pw@")
        denied = {entry["object"] for client in clients for entry in client.acl_log() if entry["username"] == role}
        # `doctor` tries which optional commands the server has, and CONFIG GET; it may not run them.
        tried = {"xreadgroup", "xadd", "eval", "config|get", "config"} if role == "doctor" else set()
        # A user of one queue may not note it in the registry; readers find its queue by scanning.
        assert denied - {"echo", "xackdel", "{chasqui:}:queues", *tried} == set()


@contextlib.asynccontextmanager
async def tasks_of(url: str) -> AsyncIterator[Queue]:
    async with Queue("q", url=url) as queue:

        @queue.task(attempts=2, backoff=timedelta(milliseconds=1))
        async def work(how: str = "") -> str:
            current_job().progress(1.0)
            if how == "fail":
                raise ValueError(how)
            if how == "hang":
                await asyncio.sleep(3600)
            return "done"

        yield queue


async def test_a_producer_and_a_worker_can_do_their_work(server: Server | Cluster) -> None:
    with user(server, "producer") as producer_url, user(server, "worker") as worker_url:
        async with tasks_of(producer_url) as queue, tasks_of(worker_url) as served:
            task = queue.tasks["work"]
            await task.every(3600)
            async with Worker(served, claim_min_idle_ms=1000, read_block_ms=100):
                assert await (await task.add()).result(20) == "done"
                assert await (await task.add_in(0.05)).result(20) == "done"
                assert await (await task.add_unique("once")).result(20) == "done"
                assert len(await task.add_bulk(["", "", ""])) == 3
                later = await task.add_in(3600)
                assert await queue.cancel_delayed(later.id)
                for adding in (queue, queue, served, served):  # the first bulk asks whether transactions may be used
                    await adding.producer.add_in_bulk(0, ["x" * 5000] * 3)
                with pytest.raises(JobFailed):
                    await (await task.add("fail")).result(20)
                assert await queue.get_job_result("none") is None
                hanging = await task.add("hang")
                async with Queue("q", url=server.url) as admin:
                    await until(lambda: is_running(admin, hanging.id), "it runs")
                    assert await admin.cancel(hanging.id) == "requested"
                    with pytest.raises(JobCancelled):
                        await hanging.result(20)
                    await admin.pause()
                    await asyncio.sleep(1.2)  # the worker looks once a second
                    await admin.resume()
                for node in nodes_of(server):  # both reconnect
                    node.client().client_kill_filter(_type="normal", skipme=True)
                assert await (await task.add()).result(20) == "done"
            [schedule] = await admin_schedules(server)
            assert schedule.job_name == "work"


async def is_running(queue: Queue, job_id: str) -> bool:
    return (await queue.get_job(job_id)).state == "running"


async def admin_schedules(server: Server | Cluster) -> list[Any]:
    async with Queue("q", url=server.url) as admin:
        return await admin.get_repeatable_jobs()


async def filled(server: Server | Cluster) -> dict[str, str]:
    """Fill the queue with jobs in every state, and return their IDs."""
    async with tasks_of(server.url) as queue:
        task = queue.tasks["work"]
        await task.every(3600)
        done = await task.add()
        dead = await task.add("fail")
        async with Worker(queue):
            await done.result(20)
            with pytest.raises(JobFailed):
                await dead.result(20)
        delayed = await task.add_in(3600)
        return {"done": done.id, "dead": dead.id, "delayed": delayed.id, "waiting": (await task.add()).id}


async def test_an_operator_can_cancel_replay_remove_purge_pause_and_delete(server: Server | Cluster) -> None:
    ids = await filled(server)
    with user(server, "operator") as url:
        async with tasks_of(url) as queue:
            await queue.pause(reason="upgrade")
            assert await queue.pause_reason() == "upgrade"
            assert await queue.resume()
            await queue.pause(task="work")
            assert await queue.resume(task="work")
            assert await queue.cancel(ids["delayed"]) == "cancelled"
            assert await queue.cancel(ids["waiting"]) == "requested"
            assert len(await queue.peek_dlq()) == 1
            assert await queue.dlq_summary()
            assert await queue.replay_dlq() == 1
            assert await queue.purge() == 2
            assert await queue.remove_dlq() == 0
            [schedule] = await queue.get_repeatable_jobs()
            assert await queue.remove_repeatable_by_key(schedule.key)
            await queue.drain(timeout=5)
            for state in ("waiting", "running", "delayed", "dead"):
                await queue.jobs(state)  # type: ignore[arg-type]  # each is one of the literals
            assert await queue.workers() == []
            assert await queue.delete(force=True)


@pytest.mark.parametrize("role", ["inspector", "dashboard", "doctor"])
def test_a_reader_can_read_everything(server: Server | Cluster, role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = asyncio.run(filled(server))
    commands = [
        ("inspect",),
        ("inspect", "q"),
        ("top", "--rounds", "1"),
        ("watch", "q", "--rounds", "1"),
        ("workers",),
        ("events", "q"),
        ("queue", "list"),
        ("repeatable", "list", "q"),
        ("dlq", "peek", "q"),
        ("dlq", "summary", "q"),
        *(("job", "show", one) for one in ids.values()),
        *(("job", "why", one) for one in ids.values()),
        *(("job", "list", "q", "--state", state) for state in ("waiting", "running", "delayed", "dead")),
        *([("doctor",)] if role == "doctor" else []),
    ]
    with user(server, role, None) as url:
        monkeypatch.setenv("TAMPU_URL", url)
        for command in commands:
            done = invoke(*command)
            assert done.code in (0, 3), (command, done)
            assert "NOPERM" not in done.out + done.err, (command, done)
        if role == "dashboard":
            asyncio.run(follow(url))
        if role == "doctor" and server.version >= "7":
            told = invoke("doctor").out
            assert "not checked, because this user may not run them: XACKDEL" in " ".join(told.split()) or (
                "emulated by scripts: XACKDEL" in told and "xackdel" in lacks(server)
            )
        if role == "doctor":
            [found] = [one for one in invoke("doctor", "--json").json["findings"] if one["check"] == "capabilities"]
            assert ("native: script flags" in found["text"]) == (server.version >= "7")


@pytest.mark.servers("valkey")
async def test_a_queue_of_a_reader_reads_without_scripts(server: Server) -> None:
    ids = await filled(server)
    rules = acl_rules("inspector", "q")
    with acl_user(server, "reader", "pw", *rules):
        async with Queue("q", url=server.url.replace("://", "://reader:pw@")) as queue:
            assert (await queue.get_job(ids["dead"])).state == "dead"
            assert len(await queue.jobs("delayed")) == 1
            assert len(await queue.peek_dlq()) == len(await queue.dlq_summary()) == 1
            assert len(await queue.get_repeatable_jobs()) == 1
            with pytest.raises(RedisError, match="lacks a permission"):
                await queue.replay_dlq()
            with pytest.raises(RedisError, match="lacks a permission"):
                await queue.add("work", "")


@pytest.mark.servers("valkey")
async def test_a_worker_that_may_not_load_scripts_does_not_start(server: Server) -> None:
    with acl_user(server, "unable", "pw", "~*", "&*", "+@all", "-@scripting"):
        async with Queue("q", url=server.url.replace("://", "://unable:pw@")) as queue:
            with pytest.raises(RedisError, match=r"(?i)script"):
                await Worker(queue, handler=str).run()


async def follow(url: str) -> None:
    async with Queue("q", url=url) as queue, queue.events(last_event_id="0-0") as events:
        async for event in events:
            assert event.name
            break


@pytest.mark.parametrize("role", ROLES)
def test_no_role_can_harm_others(server: Server | Cluster, role: Role) -> None:
    rules = acl_rules(role, "q", lacks=lacks(server), read_keys=server.version >= "7")
    with acl_user(server, role, "pw", *rules), redis.Redis(port=server.port, username=role, password="pw") as ours:
        for command in FORBIDDEN:
            with pytest.raises(redis.exceptions.NoPermissionError):
                ours.execute_command(*command)
        if role in READ_ONLY:
            writes = [("SET", "{chasqui:q}:paused", "1"), ("XADD", "{chasqui:q}:stream", "*", "d", "x")]
            # An endless script stops the whole server.
            for command in (*writes, ("SCRIPT", "LOAD", "return 1"), ("EVAL", "return 1", 0), ("EVALSHA", "0" * 40, 0)):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    ours.execute_command(*command)


@pytest.mark.parametrize("role", ROLES)
def test_the_command_prints_rules_that_load(
    server: Server | Cluster, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAMPU_URL", server.url)
    done = invoke("acl", "--role", role, "--queue", "q")
    assert done.code == 0
    line = done.out.strip()
    assert line.startswith(f"ACL SETUSER q-{role} reset on >PASSWORD ")
    has_xackdel = "xackdel" not in lacks(server)
    assert ("+xackdel" in line) == (role == "worker" and has_xackdel)
    assert ("%R~" in line) == (role in READ_ONLY and server.version >= "7")
    client = nodes_of(server)[0].client()
    client.execute_command(*line.split())
    client.execute_command("ACL", "DELUSER", f"q-{role}")
    portable = invoke("acl", "--role", role, "--url", "redis://127.0.0.1:9")
    assert portable.code == 0
    assert "~{chasqui:*" in portable.out
    client.execute_command(*portable.out.strip().split())
    client.execute_command("ACL", "DELUSER", f"all-{role}")


@pytest.mark.servers("valkey")
def test_a_name_with_wildcards_matches_only_itself(server: Server) -> None:
    assert acl_rules("inspector", "a*")[0] == "~{chasqui:a\\*}*"


@pytest.mark.servers("valkey")
@pytest.mark.parametrize("queue", ["a*", "'*", '"*', "'[a-z]", "it's\\*", "\x1b*", "'?\u00e9\u202e"])
def test_the_printed_line_gives_access_to_that_queue_only(queue: str, server: Server) -> None:
    line = invoke("acl", "--role", "inspector", "--queue", queue, "--user", "u", "--url", server.url).out
    client: Any = server.client()
    client.execute_command(*as_redis_cli_reads(line))
    own, other = (f"{{chasqui:{name}}}:paused" for name in (queue, queue.translate(str.maketrans("*?[", "xyz"))))
    assert client.execute_command("ACL", "DRYRUN", "u", "GET", own) == b"OK"
    assert own == other or client.execute_command("ACL", "DRYRUN", "u", "GET", other) != b"OK"


def as_redis_cli_reads(line: str) -> list[bytes]:
    """Split a line as redis-cli does: backslashes escape inside double quotes only."""
    found, rest = [], line.strip()
    while rest:
        if not rest.startswith('"'):
            word, _, rest = rest.partition(" ")
            assert not {'"', "'"}.intersection(word)
            found.append(word.encode())
            continue
        quoted, position = b"", 1
        while rest[position] != '"':
            if rest.startswith("\\x", position):
                quoted += bytes.fromhex(rest[position + 2 : position + 4])
                position += 4
                continue
            position += rest[position] == "\\"
            quoted += rest[position].encode()
            position += 1
        found.append(quoted)
        rest = rest[position + 1 :].removeprefix(" ")
    return found


@pytest.mark.servers("valkey")
@pytest.mark.parametrize("name", ["a b", "a\nb"])
def test_a_name_with_whitespace_is_refused_because_servers_refuse_it(name: str, server: Server) -> None:
    client: Any = server.client()
    for arguments in (("u", f"~{name}"), (name, "on")):
        with pytest.raises(redis.ResponseError):
            client.execute_command("ACL", "SETUSER", *arguments)
    with pytest.raises(ConfigError, match="without whitespace"):
        acl_rules("inspector", name)
    with pytest.raises(ConfigError, match="without whitespace"):
        acl_line(name, acl_rules("inspector", "a"))
