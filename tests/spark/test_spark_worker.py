"""Workers on Spark: a job ends there as it would in a local worker."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from servers.process import eventually
from tampu.config import ConsumerConfig, ProducerConfig
from tampu.errors import ConfigError
from tampu.spark.worker import SparkWorker, load_target
from tampu.sync import SyncProducer
from tampu.wire.payload import decode_result
from tampu.wire.retry import RetryConfig

if TYPE_CHECKING:
    from spark.filling import Filled


pytestmark = pytest.mark.spark_session


def handler(job: Any) -> Any:
    import msgspec

    if job.payload["n"] % 10 == 7:
        raise ValueError(f"number {job.payload['n']}")
    return msgspec.msgpack.encode(job.payload["n"] * 2)


def config_of(**changes: Any) -> ConsumerConfig:
    retry = RetryConfig(initial_backoff_ms=10, max_backoff_ms=20, jitter_ms=0)
    return ConsumerConfig(
        **{
            "queue_name": "q",
            "max_attempts": 2,
            "store_results": True,
            "block_ms": 200,
            "shutdown_deadline_secs": 5,
            "claim_min_idle_ms": 2000,
            "retry": retry,
        }
        | changes
    )


def test_results_retries_dead_letters_and_events_are_the_engines(spark: Any, filled: Filled) -> None:
    with SyncProducer(filled.url, ProducerConfig(queue_name="q")) as producer:
        ids = producer.add_bulk([{"n": number} for number in range(300)])
    # Shipped by value: the executors need not be able to import this module.
    import sys

    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    worker = SparkWorker(spark, handler=handler, config=config_of(), url=filled.url, slots=2)
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(worker.run()))
    thread.start()
    keys = filled.keys()
    try:
        eventually(lambda: filled.client.xlen(keys.dlq) == 30, "all failed jobs are dead letters", 120)
        eventually(lambda: filled.client.xlen(keys.stream) == 0, "no job is left", 60)
    finally:
        worker.stop()
        thread.join(60)
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert ended == [2]
    assert decode_result(filled.client.get(keys.result(ids[3]))) == 6
    assert filled.client.exists(keys.result(ids[7])) == 0
    events = [entry[1][b"e"].decode() for entry in filled.client.xrange(keys.events)]
    assert {name: events.count(name) for name in ("completed", "failed", "retry-scheduled", "dlq")} == {
        "completed": 270,
        "failed": 60,
        "retry-scheduled": 30,
        "dlq": 30,
    }
    assert filled.client.exists(f"{keys.tag}:sparkw:{worker.id}") == 0
    # They left in good order: no consumer name stays behind.
    assert filled.client.execute_command("XINFO", "CONSUMERS", keys.stream, "default") == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "target"),
        ({"target": "app:queue", "handler": handler}, "not both"),
        ({"handler": handler}, "config"),
        ({"handler": handler, "config": config_of(), "slots": 0}, "slots"),
        ({"handler": handler, "config": config_of(), "slots": 1, "url": "embedded://"}, "embedded"),
        ({"target": "no_such_module:queue", "slots": 1}, "no_such_module"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], named: str) -> None:
    session: Any = None
    with pytest.raises((ConfigError, AttributeError), match=named):
        SparkWorker(session, **{"slots": 1} | arguments)


def test_a_target_without_an_attribute_is_refused() -> None:
    with pytest.raises(ConfigError, match="names only a module"):
        load_target("pytest")
