"""What operators may change. A page asks first: how many, what is kept, and which command does the same."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tampu.base.units import plural
from tampu.dashboard.access import FORM_COOKIE
from tampu.dashboard.app import Ask, NotFound, Page
from tampu.dashboard.html import MAX_SHOWN, pretty
from tampu.dashboard.pages.dead import causes_of
from tampu.dashboard.pages.job import find
from tampu.errors import ConfigError, DecodeError
from tampu.inspect.changes import edit_and_replay, fire, run_now
from tampu.inspect.dead_letters import DlqFilter
from tampu.inspect.jobs import decoded_job
from tampu.inspect.views import jsonable, opens_sealed, payload_of, redacts
from tampu.wire.codec import queue_codec
from tampu.wire.limits import PER_KEY_FIELD, Limit, own_field

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from tampu.dashboard.app import Dashboard
    from tampu.inspect.admin import QueueAdmin
    from tampu.wire.job import Job

#: Dead letters that one request replays or deletes; the page then asks whether to continue. 10,000 take about 0.6 s.
BULK = 10_000
#: Jobs that can be chosen on a page.
MAX_CHOSEN = 100
#: How long a pause may last, by the text of its choice, in seconds.
PAUSES = {"": None, "15m": 900.0, "1h": 3600.0, "8h": 8 * 3600.0}


@dataclass(frozen=True, slots=True)
class Action:
    """One kind of change."""

    #: The button, and what happens besides: what is kept, what cannot be undone.
    verb: str
    note: str
    is_danger: bool = False
    #: What its count counts.
    thing: str = "job"


ACTIONS = {
    "pause": Action("Pause", "Workers stop taking its jobs within about a second. Running jobs finish."),
    "resume": Action("Resume", "Workers take its jobs again within about a second."),
    "cancel": Action("Cancel", "Running jobs are interrupted; a job in a thread runs on until it checks.", True),
    "run-now": Action("Run now", "Delayed jobs become due at once. Retries keep the number of their attempts."),
    "replay": Action("Replay", "They enter the queue again, with their attempts reset to zero.", thing="dead letter"),
    "remove": Action("Delete", "This cannot be undone.", True, "dead letter"),
    "edit": Action("Replay", "The job enters the queue again with this payload. Its ID stays.", thing="dead letter"),
    "purge": Action("Purge", "Waiting and delayed jobs are deleted, which cannot be undone. "
                    "Running jobs, dead letters and schedules are kept.", True),
    "limit": Action("Set", "It takes effect at once, in all workers, and replaces what was set before.", thing="limit"),
    "fire": Action("Fire", "Its job is added once, now. The schedule does not change.", thing="schedule"),
    "unschedule": Action("Remove", "Jobs that it has added are kept. This cannot be undone.", True, "schedule"),
    "open": Action("Open", "The payload is shown once, decrypted, and an audit event says that you opened it."),
}  # fmt: skip


def confirm(board: Dashboard) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of the page that asks. It sets the cookie that its form must repeat."""

    async def answer(request: Request) -> Response:
        token = board.form_token(request)

        async def page(ask: Ask) -> Page:
            if not ask.may_act:
                raise NotFound("you may look, and not act")
            return await _question(ask, request.query_params.getlist("id"), token)

        response: Response = await board.get(page, is_shared=False)(request)
        if response.status_code == 200:
            root = request.scope.get("root_path", "") or "/"
            is_secure = request.url.scheme == "https"
            response.set_cookie(FORM_COOKIE, token, httponly=True, samesite="strict", secure=is_secure, path=root)
        return response

    return answer


async def _question(ask: Ask, ids: list[str], token: str) -> Page:
    name = ask.query.get("action", "")
    action = ACTIONS.get(name)
    if action is None or (name == "open" and not ask.board.open_payloads):
        raise NotFound(f"no action {name!r}")
    admin = await ask.admin()
    count, about, command, upto = await _target(ask, admin, name, ids)
    hidden = [("action", name), ("q", admin.name), ("form", token), ("back", _back(ask)), ("upto", upto)]
    hidden += [("id", one) for one in ids[:MAX_CHOSEN]]
    hidden += [(key, ask.query[key]) for key in ("task", "cluster", "name", "key", "all", "letter") if key in ask.query]
    if name == "limit":
        hidden = [pair for pair in hidden if pair[0] != "name"]  # a field of the form
    values: dict[str, Any] = {
        "action": name,
        "what": action,
        "question": f"{action.verb} {about}?",
        "count": count,
        "button": f"{action.verb} {plural(count, action.thing)}" if action.is_danger or count > 1 else action.verb,
        "queue": admin.name,
        "command": command,
        "hidden": [pair for pair in hidden if pair[1]],
        "back": _back(ask),
        "pauses": PAUSES,
    }
    if name == "limit":
        values |= {
            "of": ask.query.get("of", "queue"),
            "name": ask.query.get("name", ""),
            "limit": await _limit(ask, admin),
        }
    if name == "edit":
        values["payload"] = await _editable(admin, ids)
    json_page = {"action": name, "queue": admin.name, "count": count, "command": command}
    return Page("confirm.html", values["question"], "", json_page, values)


async def _target(ask: Ask, admin: QueueAdmin, name: str, ids: list[str]) -> tuple[int, str, str, str]:
    """Return how many an action affects, what it affects in words, the same command, and the newest letter's ID."""
    queue, query = admin.name, ask.query
    if name in ("pause", "resume"):
        task = query.get("task", "")
        about = f"task {task} of {queue}" if task else f"queue {queue}"
        return 1, about, _command("queue", name, queue, *(("--task", task) if task else ())), ""
    if name == "limit":
        return 1, f"a limit of {queue}", _command("limit", "set", queue, "--concurrency", "N"), ""
    if name == "purge":
        one = await admin.snapshot(sizes=False)
        return one.waiting + one.delayed, f"queue {queue}", _command("queue", "purge", queue), ""
    if name in ("fire", "unschedule"):
        key = query.get("key", "")
        if await admin.packed_spec(key) is None:
            raise NotFound(f"no schedule {key!r} in queue {queue!r}")
        verb = "run" if name == "fire" else "remove"
        return 1, f"schedule {key} of {queue}", _command("schedule", verb, queue, key), ""
    if name in ("cancel", "run-now", "edit", "open"):
        if not ids:
            raise NotFound("choose at least one job, and then what to do with it")
        about = f"job {ids[0]} of {queue}" if len(ids) == 1 else f"{plural(len(ids), 'job')} of {queue}"
        return len(ids), about, _command("cancel", queue, *ids) if name == "cancel" else "", ""
    words = ["dlq", name, queue]
    if query.get("cluster"):
        causes = await causes_of(ask, queue)
        mine = [one for one in causes.all if (one.cluster, one.name) == (query["cluster"], query.get("name", ""))]
        count = sum(one.letters for one in mine)
        command = _command(*words, "--cluster", query["cluster"], "--name", query.get("name", ""))
        more = "" if causes.is_complete else f" (of the newest {causes.read:,}; older ones too)"
        return count, f"{plural(count, 'dead letter')} of {query.get('name') or queue}{more}", command, causes.newest
    if query.get("all"):
        task = query.get("task", "")
        count = await admin.count_dlq(DlqFilter(name=task) if task else DlqFilter())
        of = f"all {plural(count, 'dead letter')} of {f'task {task} in ' if task else ''}{queue}"
        newest = await admin.client.call("XREVRANGE", admin.keys.dlq, "+", "-", "COUNT", 1)
        command = _command(*words, *(("--name", task) if task else ()))
        return count, of, command, newest[0][0].decode() if newest else ""
    if not ids:
        raise NotFound("choose at least one dead letter, and then what to do with it")
    command = _command(*words, *(part for one in ids for part in ("--id", one)))
    return len(ids), f"{plural(len(ids), 'dead letter')} of {queue}", command, ""


def _command(*words: str) -> str:
    return f"tampu {shlex.join(words)}"


def _back(ask: Ask) -> str:
    """Return the address to go back to: only one of this dashboard."""
    back = ask.query.get("back", "")
    is_local = back.startswith(f"{ask.root}/") and not back.startswith(("//", "/\\")) and back.isprintable()
    return back if is_local else ask.at()


async def _letter_job(admin: QueueAdmin, ids: list[str]) -> tuple[str, Job[Any]]:
    letters = await admin.peek_dlq(1, DlqFilter(ids=ids[:1]))
    job = decoded_job(letters[0].payload, letters[0].name) if letters else None
    if job is None:
        raise NotFound("that dead letter is gone, or cannot be decoded")
    return letters[0].dlq_id, job


async def _editable(admin: QueueAdmin, ids: list[str]) -> str:
    """Return the payload of a letter as JSON. What JSON cannot hold, or must not be shown, cannot be edited."""
    _, job = await _letter_job(admin, ids)
    if redacts():
        raise ConfigError("payloads are redacted here: what would be replayed is not what is shown")
    try:
        text = json.dumps(job.payload, indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, DecodeError) as error:
        raise ConfigError(f"this payload is not JSON, so it cannot be edited here: {error}") from error
    if len(text) > MAX_SHOWN:
        raise ConfigError(f"this payload has {len(text):,} characters; up to {MAX_SHOWN:,} can be edited here")
    return text


async def act(ask: Ask, form: dict[str, list[str]]) -> Page | str:
    """Do what a form asks for, and return where to go."""
    name = ask.query.get("action", "")
    if name not in ACTIONS:
        raise NotFound(f"no action {name!r}")
    admin = await ask.admin()
    ids = form.get("id", [])[:MAX_CHOSEN]
    if name == "open":
        return await _opened(ask, admin, ids)
    said = await (
        _act_on_letters(ask, admin, name, ids) if name in ("replay", "remove") else _act(ask, admin, name, ids)
    )
    if isinstance(said, Page):
        return said
    back = _back(ask)
    path, _, query = back.partition("?")
    kept = "&".join(part for part in query.split("&") if part and not part.startswith("done="))
    separator = "&" if kept else ""
    return f"{path}?{kept}{separator}{ask.at('', done=said).partition('?')[2]}"


async def _limit(ask: Ask, admin: QueueAdmin) -> Limit:
    """Return the limit that there is of what is named."""
    limits, of, name = await admin.limits(), ask.query.get("of", "queue"), ask.query.get("name", "")
    if of in ("queue", "every key"):
        return limits.queue if of == "queue" else limits.per_key
    if of not in ("task", "key"):
        raise ConfigError(f"a limit is of the queue, every key, a task or a key; got {of!r}")
    return (limits.tasks if of == "task" else limits.keys).get(name, Limit())


async def _set_limit(ask: Ask, admin: QueueAdmin) -> str:
    of, name = ask.query.get("of", ""), ask.query.get("name", "")
    number, rate = ask.query.get("concurrency", "").strip(), ask.query.get("rate", "").strip() or None
    if number and not (number.isascii() and number.isdigit() and len(number) < 10):
        raise ConfigError(f"the number of jobs must be a whole number; got {number!r}")
    limit = replace(await _limit(ask, admin), concurrency=int(number) if number else None, rate=rate)
    task, key = name if of == "task" else None, name if of == "key" else None
    field = PER_KEY_FIELD if of == "every key" else own_field(key, task)
    await admin.limit(
        {field: limit.pack() if limit.is_set else b""}, f"{of} {name}: {limit.as_dict() or 'none'}".strip()
    )
    return f"The limit of {f'{of} {name}'.strip()} is {'set' if limit.is_set else 'removed'}."


async def _act(ask: Ask, admin: QueueAdmin, name: str, ids: list[str]) -> str:
    query = ask.query
    task = query.get("task") or None
    what = f"Task {task}" if task else f"Queue {admin.name}"
    if name == "pause":
        if query.get("for", "") not in PAUSES:
            raise ConfigError(f"a pause ends after one of {', '.join(filter(None, PAUSES))}, or when it is resumed")
        secs = PAUSES[query.get("for", "")]
        await admin.pause(task, query.get("reason", "")[:500], None if secs is None else timedelta(seconds=secs))
        return f"{what} is paused."
    if name == "resume":
        return f"{what} is resumed." if await admin.resume(task) else f"{what} was not paused."
    if name == "purge":
        if query.get("typed") != admin.name:
            raise ConfigError(f"type the name of the queue, {admin.name}, to purge it")
        return f"{plural(await admin.purge(waiting=True, delayed=True), 'job')} deleted."
    if name == "limit":
        return await _set_limit(ask, admin)
    if name == "cancel":
        outcomes = list((await admin.cancel_all(ids, query.get("reason", "")[:500])).values())
        done, asked = outcomes.count("cancelled"), outcomes.count("requested")
        return f"{plural(done, 'job')} cancelled, {asked:,} to be dropped or interrupted within about two seconds."
    if name == "run-now":
        return f"{plural(await run_now(admin, ids), 'job')} due now."
    if name == "edit":
        dlq_id, _ = await _letter_job(admin, ids)
        if redacts():
            raise ConfigError("payloads are redacted here, so they cannot be edited")
        try:
            payload = json.loads(query.get("payload", ""), parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the payload is not valid JSON: {error}") from error
        return "Replayed with the new payload." if await edit_and_replay(admin, dlq_id, payload) else "It is gone."
    if name == "fire":
        return f"Added job {(await fire(admin, query.get('key', '')))[1]}."
    return "Removed." if await admin.remove_repeatable(query.get("key", "")) else "It was already gone."


def _refuse(constant: str) -> Any:
    raise ValueError(f"it contains {constant}")


async def _act_on_letters(ask: Ask, admin: QueueAdmin, name: str, ids: list[str]) -> str | Page:
    """Replay or delete dead letters: those that were there when the page asked, a limited number per request."""
    query = ask.query
    if query.get("cluster"):
        wanted = DlqFilter(cluster=query["cluster"], name=query.get("name", ""), last_id=query.get("upto"))
    elif query.get("all"):
        wanted = DlqFilter(name=query.get("task") or None, last_id=query.get("upto"))
    elif ids:
        wanted = DlqFilter(ids=ids)
    else:
        raise NotFound("no dead letter was chosen")
    if not ids and not query.get("upto"):
        raise NotFound("it is not known which letters were meant: open the page again")
    if name == "replay":
        replayed = await admin.replay_dlq(BULK, wanted)
        count, note = int(replayed), f"{plural(replayed, 'dead letter')} replayed."
        note += f" {replayed.skipped:,} cannot be decoded." if replayed.skipped else ""
        if replayed.queue_is_full:
            return f"{note} The queue is full: replay the rest when there is room."
    else:
        count = await admin.remove_dlq(BULK, wanted)
        note = f"{plural(count, 'dead letter')} deleted."
    if count < BULK:
        return note
    values = {"text": f"{note} There may be more.", "status": 200, "again": ask.at("confirm", **_same(query))}
    return Page("problem.html", "Continue?", "dead", {"done": count, "complete": False}, values)


def _same(query: dict[str, str]) -> dict[str, str]:
    return {key: query[key] for key in ("action", "q", "cluster", "name", "task", "all", "back") if query.get(key)}


async def _opened(ask: Ask, admin: QueueAdmin, ids: list[str]) -> Page:
    """Return a sealed payload opened, after the audit event was written."""
    if not ask.board.open_payloads or queue_codec(admin.name) is None or not ids:
        raise NotFound("sealed payloads are not opened here")
    _, job = await find(admin, ids[0], ask.query.get("letter", ""), [])
    if job is None:
        raise NotFound(f"the payload of job {ids[0]!r} is no longer stored")
    await admin.audit("open", detail=ids[0])
    opens_sealed.set(True)
    value = payload_of(job, admin.name, raw=False)
    values = {"text": f"Payload of {ids[0]}", "status": 200, "payload": pretty(value)[0], "again": ""}
    return Page("problem.html", "Opened payload", "jobs", {"payload": jsonable(value)}, values)
