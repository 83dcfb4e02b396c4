"""The Spark part beside plain Python: reading, writing, landing events, running jobs.

    .venv/bin/python bench/spark.py [--rows 300000] [--rounds 3] [--only read,sink,bronze,worker]

One session of `local[2,4]`, warmed up by one unmeasured run of each contestant; rounds take turns; medians are
reported. "Plain Python" is one process of the same machine doing the same work without Spark.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTHONPATH", "")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ["PYTHONPATH"])))

import msgspec
import redis
from harness import Bar, Table, fresh_server, interleave
from spark_tuples import TupleSource

from tampu.engine.config import ConsumerConfig, ProducerConfig
from tampu.engine.consumer import Consumer
from tampu.engine.sync_producer import SyncProducer
from tampu.spark.lake import bronze
from tampu.spark.options import ReadOptions
from tampu.spark.plan import plan_batch, stream_key
from tampu.spark.readers import PAGE
from tampu.spark.server import Pages, QueueServer
from tampu.spark.session import spark_session
from tampu.spark.worker import SparkWorker
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
            for page in Pages(server, "-", fetch):
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
        frame = bronze.follow(self.spark, self.url, ["events"], "events", bronze.MAX_PER_BATCH)
        bronze.land(self.spark, frame, lake, "events")
        measured = rate(self.rows, started)
        shutil.rmtree(lake)
        return measured

    def read_events_plain(self) -> float:
        """What bronze is measured against when a machine is slow: one process that decodes the same events."""
        from tampu.spark.decode import decode_events

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
        self._until_empty(key)  # warm: both tasks are up
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="read,sink,bronze,worker")
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    table = Table()
    bars: list[Bar] = []
    with fresh_server() as server, tempfile.TemporaryDirectory() as folder:
        spark = spark_session("tampu-bench", master="local[2,4]", conf={"spark.driver.memory": "1g"})
        spark.dataSource.register(TupleSource)
        bench = Bench(spark, server.url, arguments.rows)
        contestants: dict[str, Any] = {}
        if "read" in parts:
            bench.fill("read", arguments.rows)
            contestants |= {
                "read: one plain Python process": bench.read_plain,
                "read: Spark, Arrow": lambda: bench.read_spark("tampu"),
                "read: Spark, Arrow, JSON payloads": lambda: bench.read_spark("tampu", payload="json"),
                "read: Spark, tuples": lambda: bench.read_spark("tampu_tuples"),
            }
            bars += [
                Bar("read-vs-plain", 0.75, "read: Spark, Arrow", "read: one plain Python process"),
                Bar("read-vs-tuples", 1.25, "read: Spark, Arrow", "read: Spark, tuples"),
            ]
        if "sink" in parts:
            source = Path(folder) / "jobs"
            packed = msgspec.msgpack.encode(PAYLOAD).hex()
            spark.range(arguments.rows, numPartitions=4).selectExpr(f"unhex('{packed}') AS payload").write.parquet(
                str(source)
            )
            contestants |= {
                "sink: redis-py pipeline, one process": bench.write_redis_py,
                "sink: Spark, dedupe=chunk": lambda: bench.write_spark(source),
            }
            bars.append(
                Bar("sink-vs-redis-py", 1.5, "sink: Spark, dedupe=chunk", "sink: redis-py pipeline, one process")
            )
        if "bronze" in parts:
            bench.fill_events("events")
            contestants |= {
                "bronze: one process decoding events": bench.read_events_plain,
                "bronze: Spark into Parquet": lambda: bench.land(Path(folder)),
            }
        if "worker" in parts:
            contestants |= {"worker: one plain process": bench.run_plain, "worker: Spark, 2 slots": bench.run_spark}
        for name, contestant in contestants.items():
            print(f"  warming up: {name}", file=sys.stderr)
            contestant()
        interleave(arguments.rounds, contestants, table)
        spark.stop()
    if arguments.save:
        table.save(arguments.save)
    holds = table.report(bars)
    for name, least in (("bronze: Spark into Parquet", 70_000), ("worker: Spark, 2 slots", 25_000)):
        if name in table.samples:
            print(f"bar {name} {table.median(name):,.0f}/s needs {least:,}/s")
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"driver_python_peak_mb": peak_mb}))
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
