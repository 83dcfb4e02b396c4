"""Jobs: those of one queue in one state, a page at a time, filtered by task and text."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from tampu.dashboard.app import NotFound, Page
from tampu.inspect.snapshot import read_heartbeats
from tampu.inspect.views import event_json, redacted, redacted_state, state_json
from tampu.inspect.walk import PAGE, WALKED_STATES, Walk, WalkedState, Wanted

if TYPE_CHECKING:
    from tampu.dashboard.app import Ask
    from tampu.inspect.admin import QueueAdmin
    from tampu.inspect.jobs import JobState

#: What can be done with chosen jobs, by state.
ACTIONS = {"waiting": ["cancel"], "running": ["cancel"], "delayed": ["run-now", "cancel"], "dead": ["replay", "remove"]}


async def page(ask: Ask) -> Page:
    """Return the jobs of a queue in one state."""
    names = ask.queue_names()
    if not ask.query.get("q"):
        if not names:
            return Page("jobs.html", "Jobs", "jobs", {"jobs": []}, {"name": "", "names": []})
        busy = max(ask.watch.glances.values(), key=lambda one: (one.waiting + one.running, -names.index(one.queue)))
        ask.query["q"] = busy.queue
    state = cast("WalkedState", ask.query.get("state", "waiting"))
    if state not in WALKED_STATES:
        raise NotFound(f"no state {state!r}: choose from {', '.join(WALKED_STATES)}")
    admin = await ask.admin()
    wanted = Wanted(ask.query.get("task") or None, ask.query.get("text", ""))
    after = ask.query.get("after") or None
    found = await Walk(admin, state, wanted).page(after)
    jobs = [redacted_state(job) for job in found.jobs]
    if ask.wants_json:
        ends = [event_json(admin.name, entry_id, event) for entry_id, event in found.ends]
        listed = [state_json(admin.name, job, raw=False) for job in jobs]
        about = {"queue": admin.name, "state": state, "next": found.cursor, "looked_at": found.looked}
        return Page("jobs.html", "Jobs", "jobs", about | {"jobs": ends or listed})
    one = ask.watch.glances.get(admin.name)
    counts = {} if one is None else {state: getattr(one, state) for state in WALKED_STATES if state != "finished"}
    line_tasks = {job.name for job in jobs} | {event.job_name for _, event in found.ends}
    values = {
        "name": admin.name,
        "names": names,
        "state": state,
        "states": WALKED_STATES,
        "counts": counts,
        "of": getattr(one, state, None),
        "wanted": wanted,
        "tasks": sorted(line_tasks | ({wanted.task} if wanted.task else set())),
        "found": found,
        "jobs": jobs,
        "progress": await _progress(admin, jobs) if state == "running" else {},
        "alive": await _alive(admin, jobs) if state == "running" else {},
        "actions": ACTIONS.get(state, []) if ask.may_act and jobs else [],
        "after": after,
        "size": PAGE,
    }
    return Page("jobs.html", f"Jobs of {admin.name}", "jobs", None, values)


async def _progress(admin: QueueAdmin, jobs: list[JobState]) -> dict[str, tuple[float, str]]:
    """Return the progress that running jobs last reported, by ID."""
    stored = await admin.client.call_each([("GET", admin.keys.progress(job.id)) for job in jobs])
    found: dict[str, tuple[float, str]] = {}
    for job, packed in zip(jobs, stored, strict=True):
        parts = packed.decode(errors="replace").split(" ", 2) if isinstance(packed, bytes) else []
        if len(parts) == 3 and parts[0] == str(job.attempt) and parts[1].replace(".", "", 1).isdecimal():
            found[job.id] = (min(float(parts[1]), 1.0), redacted("error", parts[2]))
    return found


async def _alive(admin: QueueAdmin, jobs: list[JobState]) -> dict[str, bool]:
    """Return whether the workers of running jobs are alive, by name."""
    from tampu.inspect.snapshot import is_alive

    found: dict[str, bool] = {}
    for group in {job.group for job in jobs if job.group}:
        workers = sorted({job.worker for job in jobs if job.group == group and job.worker})
        beats = await read_heartbeats(admin.client, admin.keys, group, workers)
        found |= {
            worker: beat is None or is_alive(ttl_ms, 0) for worker, (beat, ttl_ms) in zip(workers, beats, strict=True)
        }
    return found
