"""`from chasquimq import X` can become `from tampu import X`: every name and argument of chasquimq 1.3.0's Python API.

The table was generated from the package with `inspect`; where the package is installed, it is compared again.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tampu
from servers.binaries import cache_dir

URL = "redis://127.0.0.1:6379"

NAMES = """
BackoffSpec Consumer Handler Job MissedFiresPolicy NotSupportedError Producer Queue QueueEvent QueueEvents RepeatPattern
RepeatableMeta Scheduler UnrecoverableError Worker version
""".split()

#: Signatures as in the package, with a leading `async` for coroutine functions.
SIGNATURES = {
    "Queue": f"(name, *, redis_url={URL!r}, tls=False, max_stream_len=None, max_delay_secs=None, "
    "credential_provider=None)",
    "Queue.add": "async (self, name, data, *, delay_ms=None, delay=None, attempts=None, backoff=None, job_id=None, "
    "repeat=None, missed_fires=None)",
    "Queue.add_unique": "async (self, name, data, *, job_id, delay_ms=None, delay=None, attempts=None, backoff=None, "
    "repeat=None)",
    "Queue.add_bulk": "async (self, jobs)",
    "Queue.cancel_delayed": "async (self, job_id)",
    "Queue.peek_dlq": "async (self, limit=20)",
    "Queue.replay_dlq": "async (self, limit=100)",
    "Queue.upsert_repeatable_job": "async (self, name, data, *, repeat, limit=None, start_after_ms=None, "
    "end_before_ms=None, attempts=None, backoff=None, job_id=None, missed_fires=None)",
    "Queue.get_repeatable_jobs": "async (self, limit=100)",
    "Queue.get_job_result": "async (self, job_id)",
    "Queue.get_job_result_bulk": "async (self, job_ids)",
    "Queue.remove_repeatable_by_key": "async (self, key)",
    "Queue.close": "async (self)",
    "Worker": f"(queue_name, handler, *, redis_url={URL!r}, tls=False, concurrency=100, max_attempts=25, "
    "group='default', consumer_id=None, read_block_ms=None, read_count=None, claim_min_idle_ms=None, "
    "max_payload_bytes=None, dlq_max_stream_len=None, events_enabled=True, delayed_enabled=True, run_scheduler=True, "
    "scheduler_tick_ms=None, store_results=False, result_ttl_ms=None, credential_provider=None)",
    "Worker.run": "async (self)",
    "Worker.close": "async (self)",
    "Job": "(id, name, data, attempt, created_at_ms)",
    "Job.wait_for_result": "async (self, *, timeout=30.0, poll_interval=0.1)",
    "QueueEvents": f"(queue_name, *, redis_url={URL!r}, tls=False, last_event_id='$', block_ms=5000, count=100)",
    "QueueEvents.close": "async (self)",
    "QueueEvent": "(name, job_id, job_name, fields)",
    "BackoffSpec": "(kind, delay_ms, max_delay_ms=None, multiplier=None, jitter_ms=None)",
    "BackoffSpec.fixed": "(delay_ms, jitter_ms=None)",
    "BackoffSpec.exponential": "(initial_ms, *, multiplier=2.0, max_ms=None, jitter_ms=None)",
    "BackoffSpec.to_dict": "(self)",
    "RepeatPattern": "(kind, expression=None, tz=None, interval_ms=None)",
    "RepeatPattern.cron": "(expression, *, tz=None)",
    "RepeatPattern.every": "(interval_ms)",
    "RepeatPattern.to_dict": "(self)",
    "MissedFiresPolicy": "(kind, max_catchup=None)",
    "MissedFiresPolicy.skip": "()",
    "MissedFiresPolicy.fire_once": "()",
    "MissedFiresPolicy.fire_all": "(max_catchup)",
    "MissedFiresPolicy.to_dict": "(self)",
    "RepeatableMeta": "(key, job_name, pattern, next_fire_ms, limit=None, start_after_ms=None, end_before_ms=None, "
    "missed_fires=None)",
}
PROPERTIES = {
    "Queue": ["name", "is_closed"],
    "Worker": ["name", "is_running", "is_closed"],
    "Job": ["attempts_made"],
    "QueueEvents": ["name"],
}

#: Defaults that differ, and their meaning.
OURS: dict[tuple[str, str], str] = {
    ("Queue", "redis_url"): "None means TAMPU_URL, else the same",
    ("Worker", "redis_url"): "None means TAMPU_URL, else the same",
    ("QueueEvents", "redis_url"): "None means TAMPU_URL, else the same",
    ("Worker", "max_attempts"): "None means 25 for a handler and 7 for tasks",
    ("Worker", "store_results"): "None means False for a handler and True for tasks",
    ("RepeatableMeta", "missed_fires"): "the policy itself: skip",
}


def theirs(text: str) -> tuple[bool, inspect.Signature]:
    made: dict[str, Any] = {}
    is_async = text.startswith("async ")
    exec(f"def function{text.removeprefix('async ')}: ...", made)
    return is_async, inspect.signature(made["function"])


def found(name: str) -> Any:
    thing: Any = tampu
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_can_be_imported_from_here(name: str) -> None:
    assert hasattr(tampu, name)
    assert name in tampu.__all__


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_call_that_chasquimq_accepts_is_accepted(name: str) -> None:
    is_async, wanted = theirs(SIGNATURES[name])
    ours = inspect.signature(found(name))
    assert inspect.iscoroutinefunction(found(name)) == is_async
    order = [*ours.parameters]
    for position, parameter in enumerate(wanted.parameters.values()):
        if name == "Worker" and parameter.name == "queue_name":
            assert order[0] == "queue"  # a name, a Queue or several
            assert "queue_name" in order
            continue
        own = ours.parameters[parameter.name]
        if parameter.kind is parameter.KEYWORD_ONLY:
            assert own.kind in (own.KEYWORD_ONLY, own.POSITIONAL_OR_KEYWORD)
        else:
            assert (own.kind, order[position]) == (own.POSITIONAL_OR_KEYWORD, parameter.name)
        if (name, parameter.name) not in OURS and parameter.default is not parameter.empty:
            assert own.default == parameter.default, parameter.name
    for own in ours.parameters.values():
        is_extra = own.name not in wanted.parameters and own.name != "queue"
        assert not is_extra or own.default is not own.empty or own.kind is own.VAR_KEYWORD, own.name


@pytest.mark.parametrize("name", PROPERTIES)
def test_its_properties_exist(name: str) -> None:
    for attribute in PROPERTIES[name]:
        assert isinstance(inspect.getattr_static(getattr(tampu, name), attribute), property)


def test_defaults_of_none_have_the_same_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAMPU_URL", raising=False)

    async def handler(job: tampu.Job[Any]) -> None: ...

    assert tampu.Queue("q").url == URL
    assert tampu.Worker("q", handler)._queues[0].url == URL
    assert tampu.Worker("q", handler).config.store_results is False
    assert tampu.Worker("q", handler).config.max_attempts == 25
    assert (
        tampu.RepeatableMeta("k", "n", tampu.RepeatPattern.every(1), 1).missed_fires == tampu.MissedFiresPolicy.skip()
    )


def test_fields_are_in_the_same_order() -> None:
    """In chasquimq they are dataclasses, so people create them by position."""
    job = tampu.Job("id", "name", {"a": 1}, 2, 3)
    assert (job.id, job.name, job.data, job.attempt, job.created_at_ms, job.attempts_made) == (
        "id",
        "name",
        {"a": 1},
        2,
        3,
        2,
    )
    assert job == tampu.Job("id", "name", {"a": 1}, 2, 3)
    assert tampu.QueueEvent("completed", None, "", {"ts": 1}).fields == {"ts": 1}
    assert tampu.BackoffSpec("fixed", 5, 6, 1.5, 7).to_dict() == {  # type: ignore[arg-type]
        "kind": "fixed",
        "delay_ms": 5,
        "max_delay_ms": 6,
        "multiplier": 1.5,
        "jitter_ms": 7,
    }
    meta = tampu.RepeatableMeta("k", "n", tampu.RepeatPattern("every", None, None, 5), 7, 8, 9, 10)
    assert (meta.next_fire_ms, meta.limit, meta.start_after_ms, meta.end_before_ms) == (7, 8, 9, 10)


def test_to_dict_returns_the_same_dicts() -> None:
    assert tampu.BackoffSpec.fixed(100).to_dict() == {"kind": "fixed", "delay_ms": 100}
    assert tampu.BackoffSpec.fixed(100, 5).to_dict() == {"kind": "fixed", "delay_ms": 100, "jitter_ms": 5}
    assert tampu.BackoffSpec.exponential(100).to_dict() == {"kind": "exponential", "delay_ms": 100, "multiplier": 2.0}
    assert tampu.BackoffSpec.exponential(1, multiplier=3.0, max_ms=9, jitter_ms=2).to_dict() == {
        "kind": "exponential",
        "delay_ms": 1,
        "max_delay_ms": 9,
        "multiplier": 3.0,
        "jitter_ms": 2,
    }
    assert tampu.RepeatPattern.cron("0 9 * * *").to_dict() == {"kind": "cron", "expression": "0 9 * * *"}
    assert tampu.RepeatPattern.cron("0 9 * * *", tz="UTC").to_dict()["tz"] == "UTC"
    assert tampu.RepeatPattern.every(5).to_dict() == {"kind": "every", "interval_ms": 5}
    assert tampu.MissedFiresPolicy.fire_all(3).to_dict() == {"kind": "fire-all", "max_catchup": 3}
    assert tampu.MissedFiresPolicy.fire_once().to_dict() == {"kind": "fire-once"}


def test_errors_are_what_chasquimq_raises() -> None:
    for error in (
        tampu.UnrecoverableError,
        tampu.NotSupportedError,
        tampu.RedisError,
        tampu.ConfigError,
        tampu.ShutdownError,
    ):
        assert issubclass(error, RuntimeError)
    assert issubclass(tampu.ConfigError, ValueError)
    # Errors that its encoder passes on: TypeError for a set, ValueError for a lone surrogate or a recursive list.
    assert issubclass(tampu.EncodeError, TypeError)
    assert issubclass(tampu.EncodeError, ValueError)
    assert issubclass(tampu.DecodeError, ValueError)


def test_a_function_returns_the_version() -> None:
    assert tampu.version() == tampu.__version__ == importlib.metadata.version("tampu")


DUMP = """
import inspect, json, chasquimq
def text(thing):
    parameters = [one.replace(annotation=one.empty) for one in inspect.signature(thing).parameters.values()]
    parameters = [one for one in parameters if one.name != "_queue"]
    return ("async " if inspect.iscoroutinefunction(thing) else "") + str(inspect.Signature(parameters))
found, properties = {}, {}
for name in (
    "Queue Worker Job QueueEvents QueueEvent BackoffSpec RepeatPattern MissedFiresPolicy RepeatableMeta".split()
):
    kind = getattr(chasquimq, name)
    found[name] = text(kind)
    for member in vars(kind):
        thing = inspect.getattr_static(kind, member)
        if member.startswith("_"):
            continue
        if isinstance(thing, property):
            properties.setdefault(name, []).append(member)
        elif callable(getattr(kind, member)):
            found[f"{name}.{member}"] = text(getattr(kind, member))
print(json.dumps([chasquimq.__all__, found, properties]))
"""


def test_the_table_matches_the_installed_package() -> None:
    python = cache_dir() / f"peers/chasquimq-1.3.0-py{sys.version_info.major}.{sys.version_info.minor}/bin/python"
    if not Path(python).exists():
        pytest.skip("chasquimq 1.3.0 is not installed: see scripts/install_peers.py")
    names, signatures, properties = json.loads(subprocess.check_output([str(python), "-c", DUMP]))
    assert sorted(names) == sorted(NAMES)
    assert signatures == SIGNATURES
    assert {name: sorted(found) for name, found in properties.items()} == {
        name: sorted(wanted) for name, wanted in PROPERTIES.items()
    }
