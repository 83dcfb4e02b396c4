"""Compares Spark with plain Python: reading, writing, landing events, running jobs.

    .venv/bin/python -m bench.spark [--rows 1000000] [--rounds 3] [--only read,sink,bronze,worker]

A separate process, which the full run also starts. It uses one session of `local[2,4]`, warmed up by one unmeasured run
of each contestant, in interleaved rounds. "Plain Python" is one process that does the same work without Spark.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

# Spark's Python processes import `bench.spark_tuples`.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")))
)

import msgspec
import redis

from bench import bars
from bench.record import Record, new_record
from bench.runner import Measure, interleave
from bench.server import fresh_server
from bench.spark_tuples import TupleSource
from tampu.config import ConsumerConfig, ProducerConfig
from tampu.consume.consumer import Consumer
from tampu.spark.lake import bronze
from tampu.spark.lake.store import Store
from tampu.spark.lake.table import Table
from tampu.spark.options import ReadOptions
from tampu.spark.read.offsets import stream_key
from tampu.spark.read.plan import plan_batch
from tampu.spark.server import PAGE, QueueServer, pages
from tampu.spark.session import spark_session
from tampu.spark.worker import SparkWorker
from tampu.sync import SyncProducer
from tampu.wire.entry import read_job_fields
from tampu.wire.envelope import decode_job, encode_envelope
from tampu.wire.keys import QueueKeys
from tampu.wire.payload import encode_slot

PAYLOAD = {"to": "ada@example.com", "subject": "hello", "n": 12345, "body": "x" * 40}
PATIENCE_SECS = 300.0


def rate(count: int, started: float) -> float:
    return count / (time.perf_counter() - started)


class Bench:
    """The contestants, on one server and one session."""

    def __init__(self, spark: Any, url: str, rows: int) -> None:
        self.spark = spark
        self.url = url
        self.rows = rows
        self.client = redis.Redis.from_url(url, protocol=2)
        self._numbers = itertools.count()

    def fill(self, queue: str, count: int) -> None:
        with SyncProducer(self.url, ProducerConfig(queue_name=queue, max_stream_len=100_000_000)) as producer:
            producer.add_bulk([PAYLOAD] * count)

    # --- reading

    def read_plain(self) -> float:
        started = time.perf_counter()
        options = ReadOptions.parse({"url": self.url, "queue": "read", "stream": "jobs"})
        with QueueServer(self.url, "read") as server:
            key = stream_key(server.keys, "jobs")

            async def fetch(pipe: Any, start: str) -> Any:
                page = await pipe.call("XRANGE", key, start, "+", "COUNT", PAGE)
                return page, "(" + page[-1][0].decode() if len(page) == PAGE else None

            count = 0
            for page in pages(server, "-", fetch):
                rows = []
                for entry_id, fields in page:
                    envelope, name = read_job_fields(fields)
                    job = decode_job(envelope or b"", name)
                    rows.append((entry_id, job.id, job.name, job.attempt, job.created_at_ms, job._slot))
                count += len(rows)
        assert count == self.rows, options
        return rate(count, started)

    def read_spark(self, source: str, **options: str) -> float:
        started = time.perf_counter()
        frame = self.spark.read.format(source).options(url=self.url, queue="read", stream="jobs", **options).load()
        frame.write.format("noop").mode("overwrite").save()
        return rate(self.rows, started)

    # --- writing

    def write_redis_py(self) -> float:
        key = QueueKeys(f"w{next(self._numbers)}").stream
        slot = encode_slot(PAYLOAD)
        started = time.perf_counter()
        for start in range(0, self.rows, 1000):
            pipe = self.client.pipeline(transaction=False)
            for number in range(start, min(start + 1000, self.rows)):
                pipe.xadd(key, {"d": encode_envelope(f"{number:026d}", slot, 1_750_000_000_000)})
            pipe.execute()
        measured = rate(self.rows, started)
        self.client.unlink(key)
        return measured

    def write_spark(self, source: Path) -> float:
        queue = f"w{next(self._numbers)}"
        frame = self.spark.read.parquet(str(source))
        started = time.perf_counter()
        frame.write.format("tampu").options(url=self.url, queue=queue).mode("append").save()
        measured = rate(self.rows, started)
        assert self.client.xlen(QueueKeys(queue).stream) == self.rows
        self.client.unlink(QueueKeys(queue).stream)
        return measured

    # --- bronze

    def fill_events(self, queue: str) -> None:
        key = QueueKeys(queue).events
        for start in range(0, self.rows, 1000):
            pipe = self.client.pipeline(transaction=False)
            for number in range(start, start + 1000):
                fields = {"e": "completed", "id": f"01JD3M0DEM{number:016d}", "ts": 1_750_000_000_000 + number}
                fields |= {
                    "n": "work",
                    "attempt": 1,
                    "duration_us": 17,
                    "created_at_ms": 1_750_000_000_000,
                    "worker": "w",
                }
                pipe.xadd(key, fields)
            pipe.execute()

    def land(self, folder: Path) -> float:
        lake = folder / f"lake{next(self._numbers)}"
        started = time.perf_counter()
        store = Store.of(lake)
        table = Table(store, "bronze/events")
        landing = bronze.Landing(self.spark, self.url, ["events"], table, store, bronze.MAX_PER_BATCH)
        landing.run()
        landing.close()
        measured = rate(self.rows, started)
        shutil.rmtree(lake)
        return measured

    def read_events_plain(self) -> float:
        """Return the reference for bronze on a slow machine: one process that decodes the same events."""
        from tampu.spark.read.decode import decode_events

        started = time.perf_counter()
        (span, *_) = plan_batch(ReadOptions.parse({"url": self.url, "queue": "events"}))
        count, start = 0, "-"
        with QueueServer(self.url, span.queue) as server:
            while page := server.call("XRANGE", server.keys.events, start, "+", "COUNT", PAGE):
                count += decode_events(span.queue, page, "binary").num_rows
                start = "(" + page[-1][0].decode()
        return rate(count, started)

    # --- running

    def _until_empty(self, key: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECS
        while self.client.xlen(key) and time.monotonic() < deadline:
            time.sleep(0.01)

    def run_plain(self) -> float:
        self.fill("plain", self.rows)
        key = QueueKeys("plain").stream

        async def work() -> float:
            shutdown = asyncio.Event()
            config = ConsumerConfig(queue_name="plain", batch=256, concurrency=256, events_enabled=False)
            task = asyncio.create_task(Consumer(self.url, config).run(no_op, shutdown))
            started = time.perf_counter()
            while await asyncio.to_thread(self.client.xlen, key):  # noqa: ASYNC110 - another process empties it
                await asyncio.sleep(0.01)
            measured = rate(self.rows, started)
            shutdown.set()
            await task
            return measured

        return asyncio.run(work())

    def run_spark(self) -> float:
        queue = f"spark{next(self._numbers)}"
        key = QueueKeys(queue).stream
        self.fill(queue, 1000)
        config = ConsumerConfig(queue_name=queue, batch=256, concurrency=256, events_enabled=False)
        worker = SparkWorker(self.spark, handler=no_op, config=config, url=self.url, slots=2)
        thread = threading.Thread(target=worker.run)
        thread.start()
        self._until_empty(key)  # warm-up: both tasks are running
        time.sleep(1)
        self.fill(queue, 1)
        self._until_empty(key)
        # Paused while it is filled, so that only running is measured.
        self.client.set(QueueKeys(queue).paused, "1")
        time.sleep(2.5)
        self.fill(queue, self.rows)
        self.client.delete(QueueKeys(queue).paused)
        while self.client.xlen(key) == self.rows:
            time.sleep(0.002)
        started = time.perf_counter()
        self._until_empty(key)
        measured = rate(self.rows, started)
        worker.stop()
        thread.join(60)
        return measured


async def no_op(job: Any) -> None:
    return None


def measures(bench: Bench, spark: Any, folder: Path, parts: list[str]) -> list[Measure]:
    """Return the contestants of the given parts, and fill the server for them."""
    rows = bench.rows
    found: dict[tuple[str, str], Any] = {}
    if "read" in parts:
        bench.fill("read", rows)
        found |= {
            ("spark-read", "plain Python"): bench.read_plain,
            ("spark-read", "Spark, Arrow"): lambda: bench.read_spark("tampu"),
            ("spark-read", "Spark, Arrow, JSON payloads"): lambda: bench.read_spark("tampu", payload="json"),
            ("spark-read", "Spark, tuples"): lambda: bench.read_spark("tampu_tuples"),
        }
    if "sink" in parts:
        source = folder / "jobs"
        packed = msgspec.msgpack.encode(PAYLOAD).hex()
        spark.range(rows, numPartitions=4).selectExpr(f"unhex('{packed}') AS payload").write.parquet(str(source))
        found |= {
            ("spark-sink", "redis-py pipeline"): bench.write_redis_py,
            ("spark-sink", "Spark"): lambda: bench.write_spark(source),
        }
    if "bronze" in parts:
        bench.fill_events("events")
        found |= {
            ("spark-bronze", "plain Python, decoding only"): bench.read_events_plain,
            ("spark-bronze", "Spark"): lambda: bench.land(folder),
        }
    if "worker" in parts:
        found |= {("spark-worker", "plain Python"): bench.run_plain, ("spark-worker", "Spark"): bench.run_spark}
    return [
        Measure(scenario, contestant, lambda run=run: {"rate": run()}, {"rows": rows})  # type: ignore[misc]
        for (scenario, contestant), run in found.items()
    ]


def measure(rows: int, rounds: int, parts: list[str]) -> Record:
    """Measure everything in one session on one server."""
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    with fresh_server() as server, tempfile.TemporaryDirectory() as folder:
        record = new_record("spark", f"Redis {server.version}")
        spark = spark_session("tampu-bench", master="local[2,4]", conf={"spark.driver.memory": "1g"})
        spark.dataSource.register(TupleSource)
        contestants = measures(Bench(spark, server.url, rows), spark, Path(folder), parts)
        for contestant in contestants:
            print(f"  warming up: {contestant.scenario}, {contestant.contestant}", file=sys.stderr)
            contestant.run()
        interleave(contestants, rounds, record, lambda: None)
        record.contestants["Spark"] = {
            "versions": {"pyspark": spark.version},
            "settings": {"session": "local[2,4], 1 GB for the driver, warmed up by one run of each"},
        }
        spark.stop()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    record.add("spark-driver", "Spark", 0, {"rows": rows}, {"python_peak_mb": peak_mb})
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="read,sink,bronze,worker")
    parser.add_argument("--file", type=Path)
    arguments = parser.parse_args()
    record = measure(arguments.rows, arguments.rounds, arguments.only.split(","))
    lines = bars.judge(record)
    if arguments.file:
        record.save(arguments.file)
    print("\n".join(lines))
    return 0 if all(bar["holds"] for bar in record.bars) else 1


if __name__ == "__main__":
    sys.exit(main())
