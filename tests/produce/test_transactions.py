"""Large jobs are added by plain XADDs in a transaction that ends with a commit: each once, or not at all."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from support.producers import chain_of, open_producer, use_small_windows
from support.proxy import Proxy
from support.queues import QueueView
from support.users import acl_user
from support.waiting import until
from tampu import AddOptions, BackoffSpec, JobRetryOverride, OutcomeUnknownError, QueueFullError, RedisError
from tampu.produce import window as window_module
from tampu.produce.options import Using
from tampu.wire.envelope import decode_job

if TYPE_CHECKING:
    from servers.cluster import Cluster
    from servers.process import Server
    from tampu import Producer

EVERY_SERVER = ("valkey", "redis62", "redis70", "redis86", "cluster86")
SIZE = 3000


def payloads(count: int) -> list[str]:
    return [f"{number:04}" * (SIZE // 4) for number in range(count)]


async def warmed_up(producer: Producer[Any]) -> list[str]:
    """Add a first window, which goes through the script, and wait for the answer whether transactions may be used."""
    ids: list[str] = [*await producer.add_bulk(payloads(1))]
    await until(lambda: chain_of(producer)._can_use_multi, "the server has answered")
    return ids


def transactions(server: Server | Cluster) -> int:
    nodes = getattr(server, "masters", [server])
    return sum(node.client().info("commandstats").get("cmdstat_exec", {"calls": 0})["calls"] for node in nodes)


@pytest.mark.servers(*EVERY_SERVER)
@pytest.mark.parametrize("config", [{}, {"payload_format": "inline"}], ids=["bin", "inline"])
@pytest.mark.parametrize(
    "options",
    [
        AddOptions(),
        AddOptions(name="résumé"),
        AddOptions(name="n", retry=JobRetryOverride(7, BackoffSpec.fixed(10))),
        Using(headers={"trace": "t"}).add_options("", None),
    ],
    ids=["plain", "named", "retry", "headers"],
)
async def test_a_large_job_is_stored_exactly_as_through_the_script(
    server: Server | Cluster, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], options: AddOptions
) -> None:
    view = QueueView(server, "q")
    async with open_producer(server.url, **config) as producer:
        await warmed_up(producer)
        before = transactions(server)
        ids = await producer.add_bulk_with_options(payloads(3), options)
        assert transactions(server) == before + 1
        monkeypatch.setattr("tampu.produce.adder.LARGE_BYTES", 10**9)
        others = await producer.add_bulk_with_options(payloads(3), options)
        assert transactions(server) == before + 1
    entries = view.client.xrange(view.keys.stream)[1:]
    assert view.ids()[1:] == [*ids, *others]
    for (_, fields), (_, other) in zip(entries[:3], entries[3:], strict=True):
        assert [*fields] == [*other]
        assert fields.get(b"n") == other.get(b"n")
        job, twin = decode_job(fields[b"d"]), decode_job(other[b"d"])
        assert fields[b"d"].replace(job.id.encode(), b"") == other[b"d"].replace(twin.id.encode(), b"").replace(
            twin.created_at_ms.to_bytes(8, "big"), job.created_at_ms.to_bytes(8, "big")
        )


@pytest.mark.servers(*EVERY_SERVER)
async def test_a_very_large_job_that_is_added_alone_goes_in_a_transaction(server: Server | Cluster) -> None:
    async with open_producer(server.url) as producer:
        ids = await warmed_up(producer)
        before = transactions(server)
        adds = [producer.add(payload) for payload in (1, "x" * window_module.LARGE_ALONE_BYTES, 2)]
        ids += await asyncio.gather(*adds)
        assert transactions(server) == before + 1
    view = QueueView(server, "q")
    assert view.ids() == ids, "in the order of their adds"


@pytest.mark.servers(*EVERY_SERVER)
async def test_a_full_queue_takes_the_jobs_that_fit_and_deletes_no_others(
    server: Server | Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_windows(monkeypatch, 4)
    view = QueueView(server, "q")
    async with open_producer(server.url, max_stream_len=7) as producer, open_producer(server.url) as other:
        ids = await warmed_up(producer)
        ids += [str(await other.add("another producer's")) for _ in range(2)]
        with pytest.raises(QueueFullError) as caught:
            await producer.add_bulk(payloads(10))
        assert len(caught.value.accepted) == 4
        assert len(caught.value.refused) == 6
        assert view.ids() == [*ids, *caught.value.accepted]
        view.client.xtrim(view.keys.stream, maxlen=0)
        again = await producer.add_bulk(payloads(4))
    assert view.ids() == again


@pytest.mark.servers(*EVERY_SERVER)
async def test_a_blocked_reader_does_not_see_jobs_that_were_taken_back(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    async with open_producer(server.url, max_stream_len=1) as producer:
        await warmed_up(producer)
        [(newest, _)] = view.client.xrange(view.keys.stream)
        reading = asyncio.create_task(asyncio.to_thread(view.client.xread, {view.keys.stream: newest}, block=3000))
        await until(lambda: any(each["flags"] == "b" for each in view.client.client_list()), "it reads")
        with pytest.raises(QueueFullError):
            await producer.add_bulk(payloads(2))
        marker = view.client.xadd(view.keys.stream, {"d": "marker"})
        [[_, entries]] = await reading
    # Redis before 7.2 wakes the reader, with an empty reply.
    assert {entry_id for entry_id, _ in entries} <= {marker}


@pytest.mark.parametrize("lost", ["request", "reply"])
async def test_a_transaction_whose_connection_breaks_is_applied_once(server: Server, lost: str) -> None:
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        ids = await warmed_up(producer)
        before = transactions(server)
        if lost == "reply":
            proxy.link.replies_held = True
        else:
            proxy.cut_requests_after(SIZE * 2)
        adding = asyncio.create_task(producer.add_bulk(payloads(4)))
        if lost == "reply":
            await until(lambda: transactions(server) > before, "it is applied")
            proxy.link.cut()
        ids += await adding
        assert chain_of(producer).windows_sent_again == 1
    assert QueueView(server, "q").ids() == ids


async def test_a_bulk_of_large_jobs_cut_at_many_bytes_is_added_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_windows(monkeypatch, 2)
    monkeypatch.setattr("tampu.produce.adder.LARGE_BYTES", 10)
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        ids = await warmed_up(producer)
        for offset in range(0, 5600, 37):
            proxy.cut_requests_after(offset)
            ids += await producer.add_bulk(["0123456789"] * 8)
            await until(lambda: chain_of(producer)._can_use_multi, "the new connection was asked")
            ids += await producer.add_bulk(["0123456789"] * 8)
        for offset in range(0, 120, 7):
            proxy.cut_replies_after(offset)
            ids += await producer.add_bulk(["0123456789"] * 8)
            ids += await producer.add_bulk(["0123456789"] * 8)
    assert QueueView(server, "q").ids() == ids


@pytest.mark.servers(*EVERY_SERVER)
async def test_a_transaction_that_arrives_after_its_resend_is_taken_back(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    async with open_producer(server.url) as producer:
        ids = await warmed_up(producer)
        sent: list[bytes] = []
        connection = producer.client.connection
        assert connection is not None
        plain = connection.request_pieces

        def noted(pieces: list[bytes], *others: Any) -> None:
            sent.extend(pieces)
            plain(pieces, *others)

        connection.request_pieces = noted  # type: ignore[assignment, method-assign]
        ids += await producer.add_bulk(payloads(3))
        async with open_producer(server.url) as other:
            ids.append(str(await other.add("another producer's")))
        replies: list[Any] = []
        plain(sent, 6, replies.extend)
        await until(lambda: replies, "the second copy arrived")
        assert replies[-1][-1] == 0
        assert view.ids() == ids
        ids += await producer.add_bulk(payloads(2))
    assert view.ids() == ids


@pytest.mark.servers(*EVERY_SERVER)
async def test_a_commit_deletes_no_jobs_but_its_own(server: Server | Cluster) -> None:
    """Its own XADDs may have failed: then the newest entries are those of others."""
    view = QueueView(server, "q")
    async with open_producer(server.url) as producer:
        ids = await producer.add_bulk(range(4))
        chain = view.keys.chain(chain_of(producer).id)
        late = (1000, 1, 0, "not-there", "nor-there")
        assert view.client.eval(window_module.COMMIT.text, 2, chain, view.keys.stream, *late) == 0
    assert view.ids() == ids


@pytest.mark.parametrize("forbidden", ["multi", "exec", "eval", "xrevrange", "xdel"])
async def test_a_user_who_may_not_run_transactions_adds_through_the_script(server: Server, forbidden: str) -> None:
    with acl_user(server, "ada", "pw", "~*", "+@all", f"-{forbidden}"):
        url = server.url.replace("redis://", "redis://ada:pw@")
        async with open_producer(url) as producer:
            ids = list(await producer.add_bulk(payloads(1)))
            ids += await producer.add_bulk(payloads(3))
            before = transactions(server)
            ids += await producer.add_bulk(payloads(3))
            assert transactions(server) == before
            assert not chain_of(producer)._can_use_multi
    assert QueueView(server, "q").ids() == ids


async def test_a_transaction_refused_as_a_whole_is_sent_through_the_script(server: Server) -> None:
    with acl_user(server, "ada", "pw"):
        async with open_producer(server.url.replace("redis://", "redis://ada:pw@")) as producer:
            ids = await warmed_up(producer)
            server.client().execute_command("ACL", "SETUSER", "ada", "-multi")
            ids += await producer.add_bulk(payloads(3))
    assert QueueView(server, "q").ids() == ids


@pytest.mark.servers(*EVERY_SERVER)
async def test_a_stream_key_of_another_type_fails_large_jobs_too(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    async with open_producer(server.url) as producer:
        await warmed_up(producer)
        view.client.delete(view.keys.stream)
        view.client.set(view.keys.stream, "text")
        with pytest.raises(RedisError, match="WRONGTYPE"):
            await producer.add_bulk(payloads(3))
        view.client.delete(view.keys.stream)
        ids = await producer.add_bulk(payloads(3))
    assert view.ids() == ids


async def test_jobs_of_a_transaction_that_is_not_committed_may_have_been_added(server: Server) -> None:
    """Only a server that breaks its own rules answers like this: the jobs are named, and nothing is sent again."""
    async with open_producer(server.url) as producer:
        await warmed_up(producer)
        connection = producer.client.connection
        assert connection is not None
        refusal = RedisError("ERR broken")
        connection.request_pieces = lambda pieces, count, on_replies: on_replies(  # type: ignore[method-assign]
            [[b"1-1", refusal, 1]]
        )
        with pytest.raises(OutcomeUnknownError, match="did not carry out the whole transaction: ERR broken") as caught:
            await producer.add_bulk(payloads(2))
        assert len(caught.value.ids) == 2
