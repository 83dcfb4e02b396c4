"""Which jobs the promoter moves, and when."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from support.delayed import LONG_AGO_MS, delay, member_of
from support.parts import consuming, running
from support.queues import QueueView
from support.waiting import until
from tampu import BackoffSpec, InMemorySink, Job, JobRetryOverride, Producer, ProducerConfig, Promoter, PromoterConfig
from tampu.redis.client import Client
from tampu.wire.entry import encode_delayed_member
from tampu.wire.envelope import encode_envelope
from tampu.wire.payload import encode_slot

if TYPE_CHECKING:
    from servers.cluster import Cluster
    from servers.process import Server
    from support.troubles import Troubles

#: Too long to poll within a test: jobs are promoted only because the promoter knew when they were due.
NEVER_MS = 3_600_000


def promoter(server: Server | Cluster, **config: Any) -> Promoter:
    return Promoter(server.url, PromoterConfig(**{"queue_name": "q"} | config))


@pytest.mark.servers
async def test_a_due_job_reaches_the_stream_with_its_name_and_its_bytes(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    member = delay(view, member_of("a", "mail", {"to": "ada"}))
    delay(view, member_of("b"), LONG_AGO_MS + 1)
    async with running(promoter(server)):
        await until(lambda: view.length() == 2, "both are in the stream")
    assert [fields for _, fields in view.entries()] == [
        [b"d", member[8:], b"n", b"mail"],
        [b"d", member_of("b")[4:]],
    ]
    assert view.delayed() == []


@pytest.mark.servers
async def test_a_promoter_keeps_going_until_nothing_is_due(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    ids = [f"{number:05}" for number in range(10_000)]
    due = {member_of(job_id): LONG_AGO_MS + number for number, job_id in enumerate(ids)}
    view.client.zadd(view.keys.delayed, due)
    metrics = InMemorySink()
    async with running(promoter(server, poll_interval_ms=NEVER_MS, metrics=metrics)):
        await until(lambda: view.length() == len(ids), "all 10,000 are in the stream")
    assert view.ids() == ids
    assert sum(tick.promoted for tick in metrics.promoter_ticks) == len(ids)
    assert max(tick.promoted for tick in metrics.promoter_ticks) == 256
    assert metrics.promoter_ticks[-1].depth == 0


@pytest.mark.servers
async def test_a_promoter_wakes_for_the_next_due_time_and_not_before(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    due_ms = view.now_ms() + 400
    delay(view, member_of("soon"), due_ms)
    async with running(promoter(server, poll_interval_ms=NEVER_MS, lock_ttl_secs=600)):
        await until(view.length, "it is in the stream", within_secs=10)
    [(entry_id, _)] = view.entries()
    assert int(entry_id.split(b"-")[0]) >= due_ms


@pytest.mark.servers
async def test_a_promoted_job_leaves_no_index_behind(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    async with Producer.connect(server.url, ProducerConfig(queue_name="q")) as producer:
        job_id = await producer.add_in(0.05, {"n": 1})
        await producer.add_in_with_id("mine", 0.05, {"n": 2})
        async with running(promoter(server, events_enabled=False)):
            await until(lambda: view.length() == 2, "both are in the stream")
    assert sorted(view.ids()) == sorted([job_id, "mine"])
    # The marker stays on purpose: the id must not be added again yet.
    assert set(view.all_keys()) == {":stream", ":dlid:mine", ":wake"}


@pytest.mark.servers
async def test_the_index_is_deleted_only_if_it_leads_to_the_promoted_member(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    keys = view.keys
    for job_id in ("same", "again", "odd"):
        delay(view, member_of(job_id))
    view.client.set(keys.delayed_index("same"), member_of("same"))
    view.client.set(keys.delayed_index("again"), member_of("again", payload="delayed again"))
    view.client.sadd(keys.delayed_index("odd"), "of a wrong type")
    async with running(promoter(server)):
        await until(lambda: view.length() == 3, "all are in the stream")
    assert {key for key in view.all_keys() if key.startswith(":didx:")} == {":didx:again", ":didx:odd"}
    assert sorted(event["id"] for event in view.events()) == ["again", "odd", "same"]


@pytest.mark.servers
async def test_due_jobs_wait_until_a_full_stream_has_room(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    for number in range(5):
        delay(view, member_of(str(number)), LONG_AGO_MS + number)
    metrics = InMemorySink()
    async with running(promoter(server, max_stream_len=3, metrics=metrics, poll_interval_ms=20)):
        await until(lambda: len(metrics.promoter_ticks) >= 3, "it polls repeatedly")
        assert view.ids() == ["0", "1", "2"]
        assert view.delayed_ids() == ["3", "4"]
        assert metrics.promoter_ticks[-1].depth == 2
        assert metrics.promoter_ticks[-1].oldest_pending_lag_ms > 1_000_000_000
        view.client.xdel(view.keys.stream, view.entries()[0][0])
        await until(lambda: view.ids() == ["1", "2", "3"], "the next one has come")
        assert view.delayed_ids() == ["4"]


async def test_a_full_stream_is_polled_at_intervals(server: Server) -> None:
    view = QueueView(server, "q")
    for number in range(2):
        delay(view, member_of(str(number)), LONG_AGO_MS + number)
    metrics = InMemorySink()
    async with running(promoter(server, max_stream_len=1, metrics=metrics, poll_interval_ms=NEVER_MS)):
        await until(view.length, "one is in the stream")
        for _ in range(20):
            await asyncio.sleep(0)
            view.client.ping()
    assert len(metrics.promoter_ticks) == 1


async def test_large_jobs_are_promoted_a_few_at_a_time(server: Server) -> None:
    view = QueueView(server, "q")
    for number in range(12):
        delay(view, member_of(str(number), payload="x" * 100_000), LONG_AGO_MS + number)
    delay(view, member_of("huge", payload="x" * 1_000_000), LONG_AGO_MS + 20)
    metrics = InMemorySink()
    async with running(promoter(server, metrics=metrics, poll_interval_ms=NEVER_MS)):
        await until(lambda: view.length() == 13, "all are in the stream")
    assert [tick.promoted for tick in metrics.promoter_ticks][:7] == [2, 2, 2, 2, 2, 2, 1]


@pytest.mark.servers
async def test_waiting_events_name_the_job(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    delay(view, member_of("a", "mail"))
    delay(view, member_of("b"), LONG_AGO_MS + 1)
    async with running(promoter(server)):
        await until(lambda: view.length() == 2, "both are in the stream")
    events = view.events()
    assert all(abs(int(event.pop("ts")) - view.now_ms()) < 60_000 for event in events)
    assert events == [
        {"e": "waiting", "id": "a", "n": "mail", "created_at_ms": "1700000000000"},
        {"e": "waiting", "id": "b", "created_at_ms": "1700000000000"},
    ]


async def test_without_events_none_are_written(server: Server) -> None:
    view = QueueView(server, "q")
    delay(view, member_of("a"))
    delay(view, b"ab")
    async with running(promoter(server, events_enabled=False)):
        await until(lambda: not view.delayed(), "nothing is left")
    assert set(view.all_keys()) == {":stream", ":dlq"}


async def test_the_events_stream_is_trimmed(server: Server) -> None:
    view = QueueView(server, "q")
    view.client.zadd(view.keys.delayed, {member_of(str(number)): LONG_AGO_MS for number in range(1000)})
    async with running(promoter(server, events_max_stream_len=100)):
        await until(lambda: view.length() == 1000, "all are in the stream")
    assert 100 <= len(view.events()) < 300


#: Unreadable members, and the detail of their dead letters.
POISON = {
    b"": "got only 0 bytes",
    b"ab": "got only 2 bytes",
    b"\xff\xff\x00\x00abc": "claims a name of 65535 bytes",
    b"\xff\xff\xff\xff": "claims a name of 4294967295 bytes",
    b"\x02\x00\x00\x00\xff\xfe" + member_of("x")[4:]: "not UTF-8",
}


@pytest.mark.servers
async def test_unreadable_members_become_dead_letters_with_their_bytes(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    for member in POISON:
        delay(view, member)
    delay(view, member_of("good"), LONG_AGO_MS + 1)
    metrics = InMemorySink()
    async with running(promoter(server, metrics=metrics)):
        await until(view.length, "the good one is in the stream")
        await until(lambda: not view.delayed(), "nothing is left")
        delay(view, member_of("later"))
        await until(lambda: view.length() == 2, "the promoter keeps promoting")
    letters = view.dead_letters()
    assert {letter.payload for letter in letters} == set(POISON)
    for letter in letters:
        assert letter.reason == "malformed"
        assert letter.source_id == ""
        assert POISON[letter.payload] in (letter.detail or "")
        assert abs((letter.failed_at_ms or 0) - view.now_ms()) < 60_000
    assert [event["reason"] for event in view.events() if event["e"] == "dlq"] == ["malformed"] * len(POISON)
    assert [letter.reason for letter in metrics.dead_letters] == ["malformed"] * len(POISON)


async def test_a_batch_of_unreadable_members_does_not_delay_the_rest(server: Server) -> None:
    view = QueueView(server, "q")
    for number in range(40):
        delay(view, b"%02d" % number)
    delay(view, member_of("good"), LONG_AGO_MS + 1)
    async with running(promoter(server, promote_batch=8, poll_interval_ms=NEVER_MS)):
        await until(view.length, "the good one is in the stream")
    assert len(view.dead_letters()) == 40


async def test_members_that_cannot_be_dead_lettered_stay_and_delay_no_other(server: Server, troubles: Troubles) -> None:
    view = QueueView(server, "q")
    view.client.set(view.keys.dlq, "of a wrong type")
    delay(view, b"ab")
    delay(view, member_of("good"))
    async with running(promoter(server, poll_interval_ms=20)):
        await until(view.length, "the good one is in the stream")
        delay(view, member_of("next"))
        await until(lambda: view.length() == 2, "and the next one")
        assert [member for member, _ in view.delayed()] == [b"ab"]
        assert troubles.about("failed; retrying") == []
        assert len(troubles.about("cannot dead-letter unreadable members of the delayed set: WRONGTYPE")) == 1
        view.client.delete(view.keys.dlq)
        await until(view.dead_letters, "it is dead-lettered once possible")
    assert view.dead_letters()[0].payload == b"ab"


async def test_a_member_rescheduled_just_before_its_promotion_stays(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = QueueView(server, "q")
    put_off, due = delay(view, member_of("put off")), delay(view, member_of("due"))
    run = Client.run

    async def put_off_first(pipe: Client, script: Any, *arguments: Any, **options: Any) -> Any:
        if script.name == "promote":
            view.client.zadd(view.keys.delayed, {put_off: view.now_ms() + 60_000})
        return await run(pipe, script, *arguments, **options)

    monkeypatch.setattr(Client, "run", put_off_first)
    async with running(promoter(server)):
        await until(view.length, "the other is in the stream")
    assert view.ids() == ["due"]
    assert [member for member, _ in view.delayed()] == [put_off]
    assert due != put_off


@pytest.mark.servers
async def test_a_member_added_before_others_during_a_promotion_is_harmless(
    server: Server | Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = QueueView(server, "q")
    for number in range(600):
        delay(view, member_of(f"b{number:03}"), LONG_AGO_MS + number)
    early = iter(range(20))
    run = Client.run

    async def put_one_before(pipe: Client, script: Any, *arguments: Any, **options: Any) -> Any:
        if script.name == "promote" and (number := next(early, None)) is not None:
            delay(view, member_of(f"a{number:02}"), LONG_AGO_MS - 1)
        return await run(pipe, script, *arguments, **options)

    monkeypatch.setattr(Client, "run", put_one_before)
    async with running(promoter(server, promote_batch=25, poll_interval_ms=NEVER_MS)):
        await until(lambda: view.length() == 620, "all are in the stream")
    assert sorted(view.ids()) == [f"a{n:02}" for n in range(20)] + [f"b{n:03}" for n in range(600)]
    assert view.delayed() == []


@pytest.mark.servers
async def test_members_of_every_form_are_promoted_together(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    slot, made_ms = encode_slot({"n": 1}, "bin"), 1_700_000_000_000
    retry = JobRetryOverride(7, BackoffSpec.fixed(5))
    envelopes = {
        "usual": encode_envelope("usual", slot, made_ms),
        "retried": encode_envelope("retried", slot, made_ms, 3),
        "often retried": encode_envelope("often retried", slot, made_ms, 300),
        "overrides": encode_envelope("overrides", slot, made_ms, 0, retry),
        "small time": encode_envelope("small time", slot, 7),
        "long id " + "x" * 40: encode_envelope("long id " + "x" * 40, slot, made_ms),
        "inline": encode_envelope("inline", encode_slot([1, {"a": "b"}], "inline"), made_ms),
    }
    due = LONG_AGO_MS
    for name in ("", "mail", "naïve"):
        for envelope in envelopes.values():
            delay(view, encode_delayed_member(name, envelope), due)
            due += 1
    async with running(promoter(server, events_enabled=True)):
        await until(lambda: len(view.events()) == 21, "all are in the stream, with their events")
    assert view.ids() == [*envelopes] * 3
    assert [(event["id"], event.get("n", ""), event["created_at_ms"]) for event in view.events()] == [
        (job_id, name, "7" if job_id == "small time" else str(made_ms))
        for name in ("", "mail", "naïve")
        for job_id in envelopes
    ]


#: One payload in each form of MessagePack, by its first byte.
PAYLOADS = {
    **{bytes([first]): b"" for first in (0x00, 0x7F, 0x80, 0x90, 0xA0, 0xC0, 0xC2, 0xC3, 0xE0, 0xFF)},
    b"\x8f": b"\xa1a\x01" * 15,
    b"\x9f": b"\x01" * 15,
    b"\xbf": b"x" * 31,
    **{
        bytes([first]): b"\xcf" * size
        for first, size in zip(range(0xCA, 0xD4), (4, 8, 1, 2, 4, 8, 1, 2, 4, 8), strict=True)
    },
    **{bytes([0xD4 + power]): b"\x05" + b"\xcf" * 2**power for power in range(5)},
    **{
        bytes([first]): size + b"\xcf" * 3
        for first, size in zip(b"\xc4\xc5\xc6", (b"\3", b"\0\3", b"\0\0\0\3"), strict=True)
    },
    **{
        bytes([first]): size + b"\xcf" * 4
        for first, size in zip(b"\xc7\xc8\xc9", (b"\3", b"\0\3", b"\0\0\0\3"), strict=True)
    },
    **{
        bytes([first]): size + b"xxx"
        for first, size in zip(b"\xd9\xda\xdb", (b"\3", b"\0\3", b"\0\0\0\3"), strict=True)
    },
    **{bytes([first]): size + b"\x91\xc0" * 3 for first, size in zip(b"\xdc\xdd", (b"\0\3", b"\0\0\0\3"), strict=True)},
    **{
        bytes([first]): size + b"\xa1a\x90" * 3 for first, size in zip(b"\xde\xdf", (b"\0\3", b"\0\0\0\3"), strict=True)
    },
}


@pytest.mark.servers
async def test_events_have_the_creation_time_behind_a_payload_of_any_form(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    created = [1_700_000_000_000, 4_000_000_000, 60_000, 200, 7]
    due = {
        encode_delayed_member("", encode_envelope(f"{first.hex()} {ms}", first + rest, ms, 1)): LONG_AGO_MS
        for first, rest in PAYLOADS.items()
        for ms in created
    }
    assert len(due) == len(PAYLOADS) * len(created) == 41 * 5
    # What is cut off, or has no time, is the worker's to refuse.
    for number, rest in enumerate(
        (b"", b"\xc4", b"\xc5\x00", b"\xdd\xff\xff\xff\xff\xc0", b"\xc0\xcf\x00", b"\xc0\xa1x", b"\xc0")
    ):
        due[b"\0\0\0\0\x94\xa2x%d" % number + rest] = LONG_AGO_MS
    view.client.zadd(view.keys.delayed, due)
    async with running(promoter(server)):
        await until(lambda: len(view.events()) == len(due), "all are in the stream, with their events")
    for event in view.events():
        _, _, ms = event["id"].partition(" ")
        assert event["created_at_ms"] == (ms or "0"), event["id"]


#: Names beyond ASCII, and bytes that look like such names but are not UTF-8.
NAMES = ["é", "\u07ff", "\u0800", "\ud7ff", "\ue000", "\uffff", "\U00010000", "\U0010ffff", "a é € 😀 b"]
NOT_NAMES = [
    *(b"\x80", b"\xc3", b"\xc3(", b"\xc0\x80", b"\xc1\xbf", b"\xe0\x9f\xbf", b"\xe2\x82", b"\xed\xa0\x80"),
    *(b"\xf0\x8f\xbf\xbf", b"\xf0\x90\x80", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xff", b"\xc3\xa9\xa9"),
]


@pytest.mark.servers
async def test_only_names_in_utf8_are_promoted(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    members = {name.encode(): encode_delayed_member(name, member_of("x")[4:]) for name in NAMES}
    members |= {name: len(name).to_bytes(4, "little") + name + member_of("x")[4:] for name in NOT_NAMES}
    view.client.zadd(view.keys.delayed, dict.fromkeys(members.values(), LONG_AGO_MS))
    async with running(promoter(server)):
        await until(lambda: not view.delayed(), "all are promoted or dead letters")
    assert {fields[3] for _, fields in view.entries()} == {name.encode() for name in NAMES}
    assert {letter.payload for letter in view.dead_letters()} == {members[name] for name in NOT_NAMES}


@pytest.mark.servers
async def test_an_undecodable_envelope_is_promoted_and_dead_lettered(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    delay(view, b"\x04\x00\x00\x00mail" + b"\xc1 no envelope")

    async def handler(job: Job[Any]) -> None:
        raise AssertionError(f"ran {job}")

    async with consuming(server.url, handler, queue_name="q"):
        await until(view.dead_letters, "it is a dead letter")
    [letter] = view.dead_letters()
    assert (letter.payload, letter.name, letter.reason) == (b"\xc1 no envelope", "mail", "decode_failed")


@pytest.mark.parametrize("score", [float("-inf"), -1, 0, 0.5])
async def test_a_score_that_is_not_a_time_is_due(server: Server, score: float) -> None:
    view = QueueView(server, "q")
    for job_id in "abc":
        delay(view, member_of(job_id), score)
    delay(view, member_of("never"), float("inf"))
    metrics = InMemorySink()
    async with running(promoter(server, promote_batch=2, poll_interval_ms=NEVER_MS, metrics=metrics)):
        await until(lambda: view.length() == 3, "they are in the stream")
    assert view.client.zcard(view.keys.delayed) == 1
    assert [tick.promoted for tick in metrics.promoter_ticks[:2]] == [2, 1]


@pytest.mark.servers
async def test_a_worker_promotes_by_default(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    delay(view, member_of("due", "mail"))
    ran: list[str] = []

    async def handler(job: Job[Any]) -> None:
        ran.append(f"{job.name} {job.id}")

    async with consuming(server.url, handler, queue_name="q"):
        await until(lambda: ran == ["mail due"], "it ran")
        assert view.client.get(view.keys.promoter_lock)
    assert not view.client.exists(view.keys.promoter_lock)


async def test_a_worker_with_delayed_enabled_off_promotes_nothing(server: Server) -> None:
    view = QueueView(server, "q")
    delay(view, member_of("due"))
    ran: list[str] = []

    async def handler(job: Job[Any]) -> None:
        ran.append(job.id)

    async with consuming(server.url, handler, queue_name="q", delayed_enabled=False):
        async with Producer.connect(server.url, ProducerConfig(queue_name="q")) as producer:
            job_id = await producer.add(1)
        await until(lambda: ran, "the worker works")
    assert ran == [job_id]
    assert view.delayed_ids() == ["due"]


async def test_a_worker_passes_its_settings_to_its_promoter(server: Server) -> None:
    view = QueueView(server, "q")
    for number in range(1000):
        view.client.xadd(view.keys.dlq, {"d": str(number)})
    delay(view, b"ab")

    async def handler(job: Job[Any]) -> None:
        pass

    async with consuming(server.url, handler, queue_name="q", dlq_max_stream_len=50, events_enabled=False):
        await until(lambda: not view.delayed(), "the unreadable member is dead-lettered")
    assert view.client.xlen(view.keys.dlq) < 300
    assert not view.client.exists(view.keys.events)


@pytest.mark.servers
async def test_one_process_may_promote_several_queues(server: Server | Cluster) -> None:
    views = [QueueView(server, name) for name in ("one", "two", "three")]
    parts = [promoter(server, queue_name=view.name) for view in views]
    async with running(*parts):
        for view in views:
            delay(view, member_of(f"of {view.name}"))
        for view in views:
            await until(view.length, f"{view.name} has its job")
    assert [view.ids() for view in views] == [["of one"], ["of two"], ["of three"]]


async def test_a_payload_of_many_values_does_not_block_the_server(server: Server) -> None:
    view = QueueView(server, "q")
    few, many = (b"\xdd" + count.to_bytes(4, "big") + b"\x01" * count for count in (9_000, 200_000))
    for job_id, payload in (("few", few), ("many", many)):
        delay(view, encode_delayed_member("", encode_envelope(job_id, payload, 1_700_000_000_000, 1)))
    async with running(promoter(server)):
        await until(lambda: len(view.events()) == 2, "both are in the stream, with their events")
    assert {event["id"]: event.get("created_at_ms") for event in view.events()} == {
        "few": "1700000000000",
        "many": None,  # the job has it; reading it here would take too long
    }
