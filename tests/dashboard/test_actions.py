"""Every action asks first, says how many it affects and which command does the same, and does that and no more."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

from cli.shop import QUEUE, Filled
from dashboard.conftest import Site, form_of, make_site
from tampu import Queue, SignedCodec
from tampu.dashboard import actions

if TYPE_CHECKING:
    import pytest

    from servers.process import Server

LETTERS = 25


async def letters(site: Site) -> list[str]:
    return [job["dead_letter"]["dlq_id"] for job in (await site.json("/jobs", q=QUEUE, state="dead"))["jobs"]]


async def audits(site: Site) -> list[str]:
    return [event["action"] for event in (await site.json("/events", q=QUEUE, kind="audit"))["events"]][::-1]


async def test_a_queue_is_paused_with_a_reason_and_resumed(site: Site, server: Server, shop: Filled) -> None:
    asked = await site.get("/confirm", q=QUEUE, action="pause")
    assert "tampu queue pause shop" in asked.text
    await site.act("pause", typed={"reason": "maintenance", "for": "15m"})
    key = f"{{chasqui:{QUEUE}}}:paused"
    assert server.client().get(key) == b"maintenance"
    assert 800 < server.client().ttl(key) <= 900
    assert "Queue%20shop%20is%20resumed." in await site.act("resume")
    assert not server.client().exists(key)
    assert await audits(site) == ["pause", "resume"]


async def test_one_task_is_paused(site: Site, shop: Filled) -> None:
    await site.act("pause", task="pay", typed={"reason": "the bank is closed"})
    found = await site.json("/queue", q=QUEUE)
    assert (found["is_paused"], found["paused_tasks"]) == (False, {"pay": "the bank is closed"})
    await site.act("resume", task="pay")
    assert (await site.json("/queue", q=QUEUE))["paused_tasks"] == {}


async def test_jobs_are_cancelled_and_run_now(site: Site, server: Server, shop: Filled) -> None:
    await site.act("run-now", id=shop.delayed)
    client: Any = server.client()
    [(_, score)] = client.zrange(f"{{chasqui:{QUEUE}}}:delayed", 0, -1, withscores=True)
    seconds, _ = client.time()
    assert abs(score / 1000 - seconds) < 5
    assert server.client().xlen(f"{{chasqui:{QUEUE}}}:wake") == 1  # the promoter need not poll for it
    await site.act("cancel", id=[shop.delayed, shop.waiting], typed={"reason": "a mistake"})
    assert (await site.json("/job", q=QUEUE, id=shop.delayed))["state"] == "cancelled"
    assert server.client().get(f"{{chasqui:{QUEUE}}}:cancel:{shop.waiting}") == b"ra mistake"
    assert await audits(site) == ["run-now", "cancel"]


async def test_run_now_leaves_a_job_alone_that_is_not_delayed(site: Site, server: Server, shop: Filled) -> None:
    assert "0%20jobs%20due%20now." in await site.act("run-now", id=shop.waiting)
    assert server.client().zcard(f"{{chasqui:{QUEUE}}}:delayed") == 1


async def test_chosen_letters_are_replayed_and_deleted(site: Site, server: Server, shop: Filled) -> None:
    first, second = await letters(site)
    asked = await site.get("/confirm", q=QUEUE, action="remove", id=first)
    assert "Delete 1 dead letter" in asked.text
    assert f"tampu dlq remove shop --id {first}" in asked.text
    await site.act("remove", id=first)
    assert await letters(site) == [second]
    await site.act("replay", id=second)
    assert await letters(site) == []
    assert server.client().xlen(f"{{chasqui:{QUEUE}}}:stream") == 2
    assert await audits(site) == ["remove", "replay"]


async def test_a_cause_is_replayed_without_other_causes_and_newer_letters(
    site: Site, server: Server, shop: Filled
) -> None:
    causes = (await site.json("/dead", q=QUEUE))["causes"]
    mine = next(cause for cause in causes if cause["error_type"] == "RuntimeError")
    asked = await site.get("/confirm", q=QUEUE, action="replay", cluster=mine["cluster"], name="pay")
    assert f"tampu dlq replay shop --cluster {mine['cluster']} --name pay" in asked.text
    # Another letter of the same cause dies while the operator reads the question.
    client: Any = server.client()
    key = f"{{chasqui:{QUEUE}}}:dlq"
    fields = next(fields for _, fields in client.xrange(key) if fields[b"error_type"] == b"RuntimeError")
    newer = client.xadd(key, fields)
    assert (await site.post(form_of(asked.text))).status_code == 303
    left = [(entry_id, fields[b"error_type"]) for entry_id, fields in client.xrange(key)]
    assert sorted(left) == sorted([(newer, b"RuntimeError"), (left[0][0], b"UnrecoverableError")])


async def test_many_letters_are_done_in_steps(
    site: Site, server: Server, shop: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "BULK", 10)
    client: Any = server.client()
    key = f"{{chasqui:{QUEUE}}}:dlq"
    [(_, fields), _] = client.xrange(key)
    for _ in range(LETTERS - 2):
        client.xadd(key, fields)
    asked = await site.get("/confirm", q=QUEUE, action="remove", all=1)
    assert f"Delete {LETTERS} dead letters" in asked.text
    done = await site.post(form_of(asked.text))
    assert done.status_code == 200
    assert "10 dead letters deleted. There may be more." in done.text
    assert "Continue" in done.text
    assert client.xlen(key) == LETTERS - 10


async def test_a_payload_is_edited_and_replayed_under_the_same_id(site: Site, server: Server, shop: Filled) -> None:
    dlq_id = (await site.json("/job", q=QUEUE, id=shop.hopeless))["dead_letter"]["dlq_id"]
    asked = await site.get("/confirm", q=QUEUE, action="edit", id=dlq_id)
    assert "&#34;card&#34;: &#34;none&#34;" in asked.text
    for bad in ("{", '{"order": NaN}', "[" * 10_000):
        assert (await site.post(form_of(asked.text) | {"payload": bad})).status_code == 404
    await site.act("edit", id=dlq_id, typed={"payload": json.dumps({"order": 3, "card": "gold"})})
    found = await site.json("/job", q=QUEUE, id=shop.hopeless)
    assert (found["state"], found["payload"]) == ("waiting", {"order": 3, "card": "gold"})
    assert await audits(site) == ["edit"]


async def test_a_queue_is_purged_only_if_its_name_is_typed(site: Site, server: Server, shop: Filled) -> None:
    asked = await site.get("/confirm", q=QUEUE, action="purge")
    assert "Purge 2 jobs" in asked.text
    for typed in ("", "Shop", "other"):
        assert (await site.post(form_of(asked.text) | {"typed": typed})).status_code == 404
    assert server.client().xlen(f"{{chasqui:{QUEUE}}}:stream") == 1
    await site.act("purge", typed={"typed": QUEUE})
    assert server.client().xlen(f"{{chasqui:{QUEUE}}}:stream") == 0
    assert len(await letters(site)) == 2  # kept, as the page says
    assert len((await site.json("/schedules"))["schedules"]) == 1


async def test_a_schedule_is_fired_and_removed(site: Site, server: Server, shop: Filled) -> None:
    await site.act("fire", key="daily")
    jobs = (await site.json("/jobs", q=QUEUE))["jobs"]
    assert len(jobs) == 2
    fired = await site.json("/job", q=QUEUE, id=jobs[1]["id"])
    assert fired["payload"] == {"order": 6}
    await site.act("unschedule", key="daily")
    assert (await site.json("/schedules"))["schedules"] == []
    assert await audits(site) == ["fire", "delete-schedule"]


async def test_limits_are_set_shown_and_removed(site: Site, shop: Filled) -> None:
    assert (await site.json("/queue", q=QUEUE))["limits"]["queue"] == {}
    await site.act("limit", of="queue", typed={"of": "queue", "concurrency": "3", "rate": ""})
    await site.act("limit", of="task", name="pay", typed={"of": "task", "name": "pay", "rate": "10/s"})
    found = await site.json("/queue", q=QUEUE)
    assert found["limits"]["queue"]["concurrency"] == 3
    assert found["limits"]["tasks"]["pay"]["rate"] == "10/s"
    assert found["gate"]["running"] == 0
    page = await site.get("/queue", q=QUEUE)
    assert "task pay" in page.text
    asked = await site.get("/confirm", q=QUEUE, action="limit", of="queue")
    for bad in ({"concurrency": "-1"}, {"rate": "fast"}, {"of": "odd"}, {"of": "task", "name": "", "rate": "1/s"}):
        assert (await site.post(form_of(asked.text) | {"of": "queue"} | bad)).status_code == 404
    await site.act("limit", of="queue", typed={"of": "queue", "concurrency": "", "rate": ""})
    assert (await site.json("/queue", q=QUEUE))["limits"]["queue"] == {}
    assert await audits(site) == ["limit"] * 3


async def test_sealed_payloads_open_only_by_opt_in_and_are_audited(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAMPU_CODEC", "signed")
    monkeypatch.setenv("TAMPU_CODEC_KEYS", "k:" + base64.b64encode(b"0" * 32).decode())
    from tampu.wire.codec import codec_from_environment

    codec = codec_from_environment()
    assert isinstance(codec, SignedCodec)
    async with Queue(QUEUE, url=server.url, codec=codec) as queue:
        job = await queue.add("pack", {"secret": "tea"})
    async with make_site(server.url) as site:
        found = await site.json("/job", q=QUEUE, id=job.id)
        assert "$sealed" in found["payload"]
        assert (await site.get("/confirm", q=QUEUE, action="open", id=job.id)).status_code == 404
    async with make_site(server.url, open_payloads=True) as site:
        assert "Open the sealed payload" in (await site.get("/job", q=QUEUE, id=job.id)).text
        asked = await site.get("/confirm", q=QUEUE, action="open", id=job.id)
        opened = await site.post(form_of(asked.text))
        assert "tea" in opened.text
        assert await audits(site) == ["open"]
        assert "$sealed" in (await site.json("/job", q=QUEUE, id=job.id))["payload"]
