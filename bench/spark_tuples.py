"""The connector as in Spark's introductory documentation, with rows as tuples: the reference for the Arrow version."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tampu.spark.options import ReadOptions
from tampu.spark.read.offsets import stream_key
from tampu.spark.read.readers import BatchReader
from tampu.spark.server import PAGE, QueueServer, pages
from tampu.spark.source import TampuDataSource
from tampu.wire.entry import read_job_fields
from tampu.wire.envelope import decode_job


class TupleReader(BatchReader):
    """Reads jobs as tuples."""

    def read(self, partition: Any) -> Any:
        span = partition.value
        with QueueServer(self._options.url, span.queue) as server:
            key = stream_key(server.keys, "jobs")

            async def fetch(pipe: Any, start: str) -> Any:
                page = await pipe.call("XRANGE", key, start, str(span.last), "COUNT", PAGE)
                return page, "(" + page[-1][0].decode() if len(page) == PAGE else None

            for page in pages(server, str(span.first), fetch):
                for entry_id, fields in page:
                    envelope, name = read_job_fields(fields)
                    job = decode_job(envelope or b"", name)
                    text = entry_id.decode()
                    ms, _, seq = text.partition("-")
                    created = datetime.fromtimestamp(job.created_at_ms / 1000, UTC)
                    slot = job._slot
                    yield (
                        span.queue,
                        text,
                        int(ms),
                        int(seq),
                        job.id,
                        job.name,
                        job.attempt,
                        created,
                        slot,
                        *[None] * 4,
                    )


class TupleSource(TampuDataSource):
    """The data source `format("tampu_tuples")`."""

    @classmethod
    def name(cls) -> str:
        return "tampu_tuples"

    def reader(self, schema: Any) -> Any:
        return TupleReader(ReadOptions.parse(self.options))
