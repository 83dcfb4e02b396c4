"""Reading stored results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from support.producers import open_producer
from tampu.errors import ConfigError

if TYPE_CHECKING:
    from servers.process import Server
    from support.queues import QueueView
    from tampu.produce.producer import Producer


@pytest.mark.servers
async def test_a_result_is_the_bytes_that_were_stored(producer: Producer[Any], view: QueueView) -> None:
    packed = msgpack.packb({"total": 7})
    view.client.set(view.keys.result("x"), packed, ex=60)
    view.client.set(view.keys.result("empty"), b"", ex=60)
    assert await producer.get_result("x") == packed
    assert await producer.get_result("empty") == b""
    assert await producer.get_result("not yet") is None


@pytest.mark.servers
async def test_many_results_are_returned_in_the_order_of_the_ids(producer: Producer[Any], view: QueueView) -> None:
    ids = [f"job {number}" for number in range(1000)]
    with view.client.pipeline(transaction=False) as pipeline:
        for job_id in ids[::2]:
            pipeline.set(view.keys.result(job_id), job_id, ex=60)
        pipeline.execute()
    results = await producer.get_result_bulk([*ids, ids[0]])
    assert results == [*(job_id.encode() if rank % 2 == 0 else None for rank, job_id in enumerate(ids)), b"job 0"]
    assert await producer.get_result_bulk([]) == []


@pytest.mark.parametrize("job_id", ["", "a\x00b", 7, None])
async def test_a_bad_id_is_refused(server: Server, job_id: Any) -> None:
    async with open_producer(server.url) as producer:
        with pytest.raises(ConfigError, match="id must be"):
            await producer.get_result(job_id)
