"""Faults that a chain survives: refused windows, lost chains, numbers that must not be reused, long outages."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from support.clients import StandInClient
from support.producers import chain_of, open_producer, use_patience, use_small_windows
from support.proxy import Proxy
from support.queues import QueueView
from support.waiting import until
from tampu.errors import Error, OutcomeUnknownError, QueueFullError, RedisError
from tampu.produce.chain import CHAIN_TTL_SECS, Chain
from tampu.produce.options import AddOptions
from tampu.produce.window import SharedWindow, SingleWindow, WindowHeader, pack_part
from tampu.redis import client as client_module
from tampu.redis.faults import ServerError, Unreachable
from tampu.wire.envelope import decode_job
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.cluster import Cluster
    from servers.process import Server

OOM = "OOM command not allowed when used memory > 'maxmemory'."
NOPERM = "NOPERM User default has no permissions to run the 'evalsha' command"
LOADING = "LOADING Redis is loading the dataset in memory"


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LAST_BACKOFF_SECS", 0.01)


@pytest.fixture
def two_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_windows(monkeypatch, 2)


class Clock:
    """A stand-in for the module `time` in a chain; tests set its time."""

    now = 1_000_000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of producers made from now on."""
    clock = Clock()
    monkeypatch.setattr("tampu.produce.chain.time", clock)
    return clock


def header_of(chain_id: str) -> WindowHeader:
    return WindowHeader(QueueKeys("q"), chain_id, cap=1000, overflow="reject", dedup_ttl_secs=60)


def single_window(job_id: str, name: bytes = b"") -> tuple[SingleWindow, asyncio.Future[Any]]:
    """Return a window of one job and the future of its caller."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    return SingleWindow(job_id, name, b"envelope", future), future


def forget_chains(view: QueueView) -> None:
    """Delete the state of all chains, as an eviction or a jump of the server's clock does."""
    view.client.delete(*(view.keys.tag + key for key in view.chain_keys()))


# --- single jobs


@pytest.mark.parametrize("name", ["", "mail"])
@pytest.mark.parametrize("ttl", [0, CHAIN_TTL_SECS])
async def test_a_single_job_is_packed_as_in_any_window(name: str, ttl: int) -> None:
    header = header_of("chain")
    single, _ = single_window("id", name.encode())
    shared = SharedWindow()
    shared.put("id", name.encode(), pack_part(b"envelope"))
    for window in (single, shared):
        window.number, window.chain_ttl_secs = 123, ttl
    assert single.packed(header) == shared.packed(header)
    assert single.ids == shared.ids
    if not ttl:
        assert header.packed_single(123, single.name, single.envelope) == shared.packed(header)


async def test_a_single_job_that_is_added_resets_the_patience(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next fault would seem to have lasted since then, and would raise at once."""
    use_patience(monkeypatch, 0.5)
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        await producer.add("before")
        # The fault: a job is applied, its reply is lost, and on the next connection the server refuses it.
        proxy.hold_replies()
        proxy.next_refusals.append([NOPERM])
        applied = asyncio.ensure_future(producer.add("applied"))
        view = QueueView(server, "q")
        await until(lambda: view.length() == 2, "it is applied")
        proxy.cut()
        with pytest.raises(OutcomeUnknownError, match="NOPERM"):
            await applied
        await producer.add("after")
        await asyncio.sleep(0.6)  # longer than the patience
        proxy.refuse(LOADING)
        await producer.add("waits a little")
        assert view.payloads() == ["before", "applied", "after", "waits a little"]


async def test_a_reply_to_an_abandoned_job_does_not_resolve_another() -> None:
    client = StandInClient()
    chain = Chain(client, header_of)  # type: ignore[arg-type]

    async def begin() -> None:
        """Send the first window of a chain, which sets its TTL: only then are single jobs sent in the short form."""
        first, added = single_window("first")
        chain.submit(first)
        client.answers[-1](b"")  # to the opening
        client.answers[-1](b"")
        assert await added == "first"

    await begin()
    abandoned, _ = single_window("abandoned")
    assert chain.send_single(abandoned)
    late = client.answers[-1]
    chain.abandon()
    await begin()
    window, added = single_window("in flight")
    assert chain.send_single(window)
    late(b"")
    assert not added.done()
    client.answers[-1](b"")
    assert await added == "in flight"


async def test_closing_returns_with_the_reply_to_a_single_job(server: Server) -> None:
    async with Proxy(server.address) as proxy, open_producer(proxy.url, retry_for_secs=600) as producer:
        await producer.add("before")
        proxy.hold_replies()
        added = asyncio.ensure_future(producer.add("in flight"))
        await until(lambda: len(proxy.calls) == 2, "it is sent")
        closing = asyncio.ensure_future(producer.close())
        await asyncio.sleep(0)  # it waits for the reply now
        proxy.resume()
        await asyncio.wait_for(closing, 20)
        assert (await added).is_new


# --- refused in the middle


@pytest.mark.servers
@pytest.mark.parametrize("name", ["", "mail"])
async def test_a_window_that_fails_in_the_middle_names_the_added_jobs(server: Server | Cluster, name: str) -> None:
    """A stream has a last possible id, after which XADD fails: here for the third and fourth job of a window."""
    view = QueueView(server, "q")
    view.client.xadd(view.keys.stream, {"d": "x"}, id=f"{2**64 - 1}-{2**64 - 3}")
    async with open_producer(server.url) as producer:
        with pytest.raises(RedisError, match="last possible") as caught:
            await producer.add_bulk_with_options(range(4), AddOptions(name=name))
        entries = view.entries()
        assert len(caught.value.accepted) == len(entries) - 1 == 2
        assert [decode_job(fields[1]).id for _, fields in entries[1:]] == caught.value.accepted
        with pytest.raises(RedisError, match="last possible"):
            await producer.add("nor is there room for this one")
        view.client.delete(view.keys.stream)
        after = await producer.add("after")
    assert view.ids() == [after]


async def test_it_names_them_also_when_its_first_reply_was_lost(server: Server) -> None:
    view = QueueView(server, "q")
    view.client.xadd(view.keys.stream, {"d": "x"}, id=f"{2**64 - 1}-{2**64 - 3}")
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        await producer.add_in(1000, "opens the chain")
        proxy.cut_replies_after(0)
        with pytest.raises(RedisError, match="reason was lost with the connection") as caught:
            await producer.add_bulk(range(4))
        assert chain_of(producer).windows_sent_again == 1
    assert caught.value.accepted == [decode_job(fields[1]).id for _, fields in view.entries()[1:]]
    assert len(caught.value.accepted) == 2


@pytest.mark.usefixtures("two_a_window")
@pytest.mark.parametrize("refused", [0, 1, 2, 3])
async def test_a_failed_window_between_good_ones_fails_only_its_own_jobs(server: Server, refused: int) -> None:
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        await producer.add("first")
        proxy.refuse(OOM, skip=refused)
        with pytest.raises(ServerError, match="OOM") as caught:
            await producer.add_bulk(range(8))
        added = QueueView(server, "q")
        expected = [number for number in range(8) if number // 2 != refused]
        assert added.payloads() == ["first", *expected]
        assert list(caught.value.accepted) == added.ids()[1:]
        assert (await producer.add("last")).is_new
        assert added.payloads()[-1] == "last"


@pytest.mark.usefixtures("two_a_window")
async def test_each_single_add_raises_the_error_of_its_own_window(server: Server) -> None:
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        await producer.add("before")
        proxy.refuse(OOM, skip=1)
        first = asyncio.ensure_future(producer.add(0))
        await asyncio.sleep(0)
        outcomes = await asyncio.gather(*(producer.add(number) for number in range(1, 5)), return_exceptions=True)
        await first
        assert [isinstance(outcome, ServerError) for outcome in outcomes] == [True, True, False, False]
        assert outcomes[0] is not outcomes[1]  # otherwise their tracebacks would add up in one error
        assert QueueView(server, "q").payloads() == ["before", 0, 3, 4]


@pytest.mark.usefixtures("two_a_window")
@pytest.mark.parametrize(
    "error",
    [
        LOADING,
        "BUSY Redis is busy running a script.",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "READONLY You can't write against a read only replica.",
        "CLUSTERDOWN Hash slot not served",
        "MASTERDOWN Link with MASTER is down",
        "NOSCRIPT No matching script.",
        "NOAUTH Authentication required.",
    ],
)
@pytest.mark.parametrize("refused", [0, 2])
async def test_a_window_that_meets_a_transient_error_is_not_overtaken(server: Server, error: str, refused: int) -> None:
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        proxy.refuse(error, skip=refused)
        ids = await producer.add_bulk(range(8))
        view = QueueView(server, "q")
        assert view.payloads() == list(range(8))
        assert view.ids() == ids


async def test_a_redirected_window_is_not_overtaken(server: Server) -> None:
    """A reply over the first connection must not arrive while one over the redirect is outstanding."""
    async with (
        Proxy(server.address) as source,
        Proxy(server.address, delay_secs=0.1) as target,
        open_producer(source.url) as producer,
    ):
        first = await producer.add("first")
        source.refuse(f"ASK 0 {target.url.removeprefix('redis://')}")
        redirected = asyncio.create_task(producer.add("redirected"))
        await until(lambda: target.calls, "it follows the redirect")
        async with asyncio.timeout(5):
            behind = await producer.add("behind")
        assert QueueView(server, "q").ids() == [first, await redirected, behind]


async def test_adds_before_a_bulk_go_before_it(server: Server) -> None:
    async with open_producer(server.url) as producer:
        first = [asyncio.ensure_future(producer.add(f"first {number}")) for number in range(3)]
        await asyncio.sleep(0)  # they are in the open window now
        bulk = await producer.add_bulk(range(600))
        assert QueueView(server, "q").ids() == [*(await asyncio.gather(*first)), *bulk]


@pytest.mark.servers
async def test_flushed_scripts_in_the_middle_of_a_bulk_are_loaded_again(
    server: Server | Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_windows(monkeypatch, 10)
    clients = [node.client() for node in getattr(server, "nodes", [server])]
    assert all(client.ping() for client in clients)  # an old server answers HELLO with errors
    view = QueueView(server, "q")
    errors = view.errors_given()
    async with open_producer(server.url) as producer:

        async def jobs() -> Any:
            for number in range(500):
                if number % 100 == 50:
                    for client in clients:
                        client.script_flush()
                yield number

        ids = await producer.add_bulk(jobs())
    assert set(view.errors_given() - errors) == {"NOSCRIPT"}
    assert view.ids() == ids
    assert view.payloads() == list(range(500))


# --- numbers that must not be reused


@pytest.mark.usefixtures("two_a_window")
async def test_a_number_that_may_be_in_use_is_not_given_to_other_jobs(server: Server) -> None:
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        before = await producer.add("before")
        # The first of two windows is applied, the second never arrives, and then the server refuses to answer.
        link = proxy.link
        sizes = link.request_bytes
        await producer.add_bulk(["earlier", "earlier"])
        one_window = link.request_bytes - sizes
        proxy.next_refusals.append([NOPERM, NOPERM])
        proxy.cut_requests_after(one_window)
        with pytest.raises(OutcomeUnknownError) as caught:
            await producer.add_bulk(["applied", "applied", "neither", "neither"])
        unknown = caught.value.ids
        assert len(unknown) == 4
        after = await producer.add("after")
        more = await producer.add_bulk(range(100, 108))
        view = QueueView(server, "q")
        assert view.payloads() == ["before", *["earlier"] * 2, *["applied"] * 2, "after", *range(100, 108)]
        assert view.ids()[0] == before
        assert view.ids()[3:5] == unknown[:2]
        assert view.ids()[5:] == [after, *more]


@pytest.mark.usefixtures("two_a_window")
async def test_a_late_reply_does_not_lower_the_confirmed_number(server: Server) -> None:
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        await producer.add("before")
        # Both windows are applied and their replies lost. Sent again, only the first one meets BUSY.
        proxy.hold_replies()
        proxy.next_refusals.append(["BUSY Redis is busy running a script."])
        bulk = asyncio.ensure_future(producer.add_bulk([1, 1, 2, 2]))
        view = QueueView(server, "q")
        await until(lambda: view.length() == 5, "both are applied")
        proxy.cut()
        ids = await bulk
        # Then a window is refused, so that the next one gets a lower number.
        proxy.refuse(OOM)
        with pytest.raises(ServerError, match="OOM") as caught:
            await producer.add_bulk([3, 3, 4, 4])
        assert view.payloads() == ["before", 1, 1, 2, 2, 4, 4]
        assert view.ids()[1:] == [*ids, *caught.value.accepted]


@pytest.mark.usefixtures("two_a_window")
@pytest.mark.parametrize("refused", [[OOM], [None, OOM], [NOPERM, NOPERM], [None, None, None, OOM], [LOADING], []])
async def test_windows_that_arrive_late_add_nothing_twice(server: Server, refused: list[str | None]) -> None:
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        await producer.add("before")
        # Four windows are in the server's socket, unread, when the connection breaks. Sent again over another one,
        # some of them are refused, so that the next ones meet a gap.
        proxy.hold_requests()
        old = proxy.link
        bulk = asyncio.ensure_future(producer.add_bulk(range(8)))
        await until(lambda: len(old.calls) == 1 + 4, "they are in flight")
        proxy.next_refusals.append(refused)
        old.strand()
        (outcome,) = await asyncio.gather(bulk, return_exceptions=True)
        # Only now does the server read the first copies.
        old.deliver()
        await old.server_is_done.wait()
        after = await producer.add_bulk(range(100, 116))
        view = QueueView(server, "q")
        found = view.ids()
        assert len(set(found)) == len(found)
        assert found[-16:] == after  # nor are later jobs mistaken for late copies
        accepted = list(getattr(outcome, "accepted", outcome))
        unknown = list(getattr(outcome, "ids", ()))
        middle = found[1:-16]
        assert set(accepted) <= set(middle) <= {*accepted, *unknown}
        assert len(accepted) + len(unknown) + 2 * sum(error == OOM for error in refused) >= 8


# --- a chain that the server has lost


@pytest.mark.servers
@pytest.mark.parametrize("count", [1, 5])
async def test_a_chain_lost_by_the_server_is_counted_and_replaced(
    server: Server | Cluster, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    async with open_producer(server.url) as producer:
        ids = [await producer.add(number) for number in range(count)]
        view = QueueView(server, "q")
        (lost,) = view.chain_keys()
        view.client.delete(view.keys.tag + lost)
        with caplog.at_level(logging.WARNING, "tampu.producer"):
            ids += [await producer.add("after"), *(await producer.add_bulk(range(600)))]
        assert chain_of(producer).windows_lost_by_server == count
        assert f"the server forgot {count} confirmed windows" in caplog.text
        assert view.ids() == ids
        (new,) = view.chain_keys()
        assert new != lost


@pytest.mark.usefixtures("two_a_window")
@pytest.mark.parametrize("kept", [0, 3])
async def test_a_lost_chain_is_counted_once_for_all_windows_in_flight(server: Server, kept: int) -> None:
    async with open_producer(server.url) as producer:
        ids = [await producer.add(number) for number in range(5)]
        view = QueueView(server, "q")
        (key,) = view.chain_keys()
        if kept:  # a failover to a replica that was behind
            view.client.hset(view.keys.tag + key, "last", 1 + kept)
        else:
            view.client.delete(view.keys.tag + key)
        ids += await producer.add_bulk(range(20))
        ids += await producer.add_bulk(range(20))
        assert chain_of(producer).windows_lost_by_server == 5 - kept
        assert view.ids() == ids


async def test_a_restart_without_persistence_is_counted_and_survived(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    async with open_producer(server.url) as producer:
        await producer.add_bulk(range(600))
        server.restart()
        ids = [await producer.add("after"), *(await producer.add_bulk(range(600)))]
        assert QueueView(server, "q").ids() == ids
        assert chain_of(producer).windows_lost_by_server == 3


async def test_an_idle_chain_that_expired_causes_no_warning(
    server: Server, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_producer(server.url) as producer:
        await producer.add("before")
        view = QueueView(server, "q")
        (expired,) = view.chain_keys()
        clock.now += CHAIN_TTL_SECS + 1
        view.client.delete(view.keys.tag + expired)
        with caplog.at_level(logging.WARNING, "tampu.producer"):
            await producer.add("an hour later")
        assert view.payloads() == ["before", "an hour later"]
        assert chain_of(producer).windows_lost_by_server == 0
        assert not caplog.records
        assert view.chain_keys() != [expired]


async def test_a_chain_in_use_renews_its_ttl(server: Server, clock: Clock) -> None:
    async with open_producer(server.url) as producer:
        view = QueueView(server, "q")
        await producer.add(0)
        (key,) = view.chain_keys()
        for minute in range(1, 121):
            clock.now += 61
            view.client.expire(view.keys.tag + key, 5)
            await producer.add(minute)
            assert CHAIN_TTL_SECS - 5 <= view.all_keys()[key] <= CHAIN_TTL_SECS
        assert view.chain_keys() == [key]
        assert view.payloads() == list(range(121))


# --- a chain that the server has forgotten, and windows whose replies were lost


@pytest.mark.usefixtures("two_a_window")
@pytest.mark.parametrize("adds_before", [0, 1])
async def test_applied_windows_of_a_forgotten_chain_are_not_applied_again(server: Server, adds_before: int) -> None:
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        await producer.add_in(1000, "opens the chain")
        before = [await producer.add("before") for _ in range(adds_before)]
        proxy.hold_replies()
        bulk = asyncio.ensure_future(producer.add_bulk(range(12)))
        view = QueueView(server, "q")
        await until(lambda: view.length() == adds_before + 8, "four windows are applied")
        forget_chains(view)
        proxy.cut()
        with pytest.raises(OutcomeUnknownError, match="the server forgot which windows") as caught:
            await bulk
        assert caught.value.code == "CMQ-007"
        assert view.ids() == [*before, *caught.value.ids, *caught.value.accepted]
        assert len(caught.value.ids) == 8
        assert len(caught.value.accepted) == 4  # the two windows that were not sent yet
        after = await producer.add("after")
        assert view.ids()[-1] == after


async def test_a_first_job_whose_reply_and_chain_are_lost_is_added_once(server: Server) -> None:
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        proxy.hold_replies()
        adding = asyncio.ensure_future(producer.add("first"))
        view = QueueView(server, "q")
        await until(view.chain_keys, "the server knows the chain")
        forget_chains(view)
        proxy.cut()
        job_id = await adding
        assert view.ids() == [job_id]


async def test_a_delayed_job_of_a_forgotten_chain_is_not_added_again(server: Server) -> None:
    """The queue has no stream yet, which does not mean that its data are lost."""
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        await producer.add_in(1000, "before")
        proxy.hold_replies()
        adding = asyncio.ensure_future(producer.add_in(1000, "applied"))
        view = QueueView(server, "q")
        await until(lambda: len(view.delayed_ids()) == 2, "it is applied")
        forget_chains(view)
        proxy.cut()
        with pytest.raises(OutcomeUnknownError) as caught:
            await adding
        assert caught.value.ids[0] in view.delayed_ids()
        assert len(view.delayed_ids()) == 2


async def test_an_applied_job_that_is_lost_with_its_chain_is_added_again(server: Server) -> None:
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        await producer.add("before")
        proxy.hold_replies()
        adding = asyncio.ensure_future(producer.add("applied"))
        view = QueueView(server, "q")
        await until(lambda: view.length() == 2, "it is applied")
        forget_chains(view)
        view.client.delete(view.keys.stream)  # a flush, or a restart without persistence
        proxy.cut()
        job_id = await adding
        assert view.ids() == [job_id]


@pytest.mark.usefixtures("two_a_window")
async def test_a_window_waiting_for_room_fails_if_its_chain_is_forgotten(server: Server) -> None:
    view = QueueView(server, "q")
    async with open_producer(server.url, overflow="wait", max_stream_len=1) as producer:
        adding = asyncio.ensure_future(producer.add_bulk(range(2)))
        await until(lambda: view.length() == 1, "the first job is added")
        forget_chains(view)
        with pytest.raises(RedisError, match="the server forgot which windows") as caught:
            await adding
        assert view.ids() == caught.value.accepted
        view.client.delete(view.keys.stream)
        job_id = await producer.add("after")
        assert view.ids() == [job_id]


# --- outages longer than the patience


@pytest.mark.slow
@pytest.mark.usefixtures("two_a_window")
async def test_an_outage_names_the_jobs_that_may_have_been_added(server: Server) -> None:
    async with Proxy(server.address) as proxy, open_producer(proxy.url, retry_for_secs=1) as producer:
        kept = await producer.add_bulk(range(4))
        proxy.hold_replies()
        bulks = [asyncio.ensure_future(producer.add_bulk([name] * 6)) for name in ("one", "other")]
        view = QueueView(server, "q")
        await until(lambda: view.length() == 12, "four windows are applied")  # of the six
        proxy.shut()
        one, other = await asyncio.gather(*bulks, return_exceptions=True)
        assert isinstance(one, OutcomeUnknownError)
        assert isinstance(other, OutcomeUnknownError)
        assert view.payloads() == [0, 1, 2, 3, *(["one"] * 6), "other", "other"]
        assert one.ids == view.ids()[4:10]  # all of its three windows
        assert other.ids == view.ids()[10:]  # and the one that was in flight
        assert one is not other
        assert (list(one.accepted), list(other.accepted)) == ([], [])
        proxy.reopen()
        after = await producer.add_bulk(range(8))
        assert view.ids() == [*kept, *one.ids, *other.ids, *after]


@pytest.mark.slow
async def test_a_job_that_was_never_sent_is_known_not_to_be_added(server: Server) -> None:
    async with Proxy(server.address) as proxy, open_producer(proxy.url, retry_for_secs=1) as producer:
        proxy.shut()
        await until(lambda: producer.client.connection is None, "the cut is noticed")
        with pytest.raises(Unreachable, match=r"no connection to 127\.0\.0\.1:\d+ within 1(\.\d)? s"):
            await producer.add("lost")
        with pytest.raises(Unreachable):
            await producer.add_bulk(range(1000))
        proxy.reopen()
        job_id = await producer.add("works again")
        assert QueueView(server, "q").ids() == [job_id]


@pytest.mark.slow
@pytest.mark.parametrize("error", [LOADING, "READONLY You can't write against a read only replica.", "NOSCRIPT None."])
async def test_an_error_that_outlasts_the_patience_is_raised(server: Server, error: str) -> None:
    async with Proxy(server.address) as proxy, open_producer(proxy.url, retry_for_secs=1) as producer:
        proxy.next_refusals.extend([[error] * 2000] * 2000)
        proxy.cut()
        await until(lambda: producer.client.connection is None, "the cut is noticed")
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(RedisError, match=error.split()[0]) as caught:
            await producer.add("refused")
        assert 0.5 <= loop.time() - began < 5
        assert not isinstance(caught.value, OutcomeUnknownError)
        proxy.next_refusals.clear()
        proxy.cut()
        job_id = await producer.add("works again")
        assert QueueView(server, "q").ids() == [job_id]


async def test_the_last_try_is_at_the_end_of_the_patience(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause that would end later is shortened, so that the last try is not skipped."""
    monkeypatch.setattr(client_module, "FIRST_BACKOFF_SECS", 1000)
    monkeypatch.setattr(client_module, "LAST_BACKOFF_SECS", 1000)
    async with Proxy(server.address) as proxy, open_producer(proxy.url, retry_for_secs=1) as producer:
        proxy.refuse("TRYAGAIN Multiple keys request during rehashing of slot")
        job_id = await producer.add("waits for the slot")
        assert QueueView(server, "q").ids() == [job_id]


async def test_each_fault_gets_the_full_patience(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_patience(monkeypatch, 0.5)
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        proxy.refuse(LOADING)
        await producer.add("waits a little")
        await asyncio.sleep(0.6)  # longer than the patience
        proxy.refuse(LOADING)
        await producer.add("so does this one")
        assert QueueView(server, "q").payloads() == ["waits a little", "so does this one"]


# --- keys of the wrong type


@pytest.mark.servers
async def test_a_stream_key_of_another_type_is_a_clear_error(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    view.client.set(view.keys.stream, "not a stream")
    async with open_producer(server.url) as producer:
        with pytest.raises(RedisError, match="WRONGTYPE") as caught:
            await producer.add(1)
        assert caught.value.code == "CMQ-001"
        with pytest.raises(RedisError, match="WRONGTYPE"):
            await producer.add_bulk(range(1000))
        view.client.delete(view.keys.stream)
        assert view.ids() == [] == view.chain_keys()
        job_id = await producer.add(1)
        assert view.ids() == [job_id]


@pytest.mark.servers
async def test_an_id_that_could_not_be_added_stays_free(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    view.client.set(view.keys.stream, "not a stream")
    # Without a cap to check, XADD is the first to meet the key, and by then the id's marker is set.
    async with open_producer(server.url, overflow="trim") as producer:
        with pytest.raises(RedisError, match="job x was not added: WRONGTYPE"):
            await producer.add_with_id("x", 1)
        view.client.delete(view.keys.stream)
        assert (await producer.add_with_id("x", 1)).is_new


@pytest.mark.servers
async def test_a_delayed_key_of_another_type_fails_the_delayed_jobs_only(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    view.client.set(view.keys.delayed, "not a set")
    async with open_producer(server.url) as producer:
        now, later, named, duplicate = await asyncio.gather(
            producer.add(1),
            producer.add_in(100, 2),
            producer.add_in_with_id("a", 100, 3),
            producer.add_in_with_id("a", 100, 3),
            return_exceptions=True,
        )
        assert view.ids() == [now]
        for outcome in (later, named, duplicate):
            assert isinstance(outcome, RedisError)
            assert "was not added" in str(outcome)
            assert "WRONGTYPE" in str(outcome)
        view.client.delete(view.keys.delayed)
        assert (await producer.add_in_with_id("a", 100, 3)).is_new  # the marker of the failed one is gone


# --- refused windows


async def test_a_refused_window_leaves_nothing_and_its_successors_are_added(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_windows(monkeypatch, 4)
    async with open_producer(server.url, max_stream_len=4) as producer:
        kept = await producer.add_bulk(range(4))
        outcomes = await asyncio.gather(
            *(producer.add_with_id(f"id {number}", number) for number in range(4)),
            *(producer.add_in_with_id(f"later {number}", 100, number) for number in range(4)),
            return_exceptions=True,
        )
        assert all(isinstance(outcome, QueueFullError) for outcome in outcomes[:4])
        assert [outcome.refused for outcome in outcomes[:4]] == [[f"id {number}"] for number in range(4)]  # type: ignore[union-attr]
        assert outcomes[4:] == [f"later {number}" for number in range(4)]
        view = QueueView(server, "q")
        assert view.ids() == kept
        assert not any(":dlid:id" in key for key in view.all_keys())  # so each may be added later
        view.client.delete(view.keys.stream)
        assert (await producer.add_with_id("id 0", 0)).is_new


def test_a_failed_window_raises_an_error_of_tampu() -> None:
    assert issubclass(OutcomeUnknownError, Error)
