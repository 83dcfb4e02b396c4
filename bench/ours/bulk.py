"""`python -m bench.ours.bulk URL TOTAL` adds one bulk from a generator and prints its peak resident memory in MB.

It is a separate process, because memory that earlier scenarios have freed would be reused and not show up.
"""

from __future__ import annotations

import asyncio
import resource
import sys

from bench.ours.adding import CONFIG
from bench.program.payloads import PAYLOAD
from tampu import Producer


async def add(url: str, total: int) -> None:
    async with Producer.connect(url, CONFIG) as producer:
        await producer.add_bulk(PAYLOAD for _ in range(total))


if __name__ == "__main__":
    asyncio.run(add(sys.argv[1], int(sys.argv[2])))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
