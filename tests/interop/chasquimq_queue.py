"""Run a chasquimq 1.3.0 Queue, with the Python of its own virtual environment.

    python chasquimq_queue.py REDIS_URL QUEUE

Reads calls as lines of JSON, [method, [arguments], {options}], and prints each result as a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import uvloop
from chasquimq import Queue, RepeatPattern


def shown(value: Any) -> Any:
    """Convert a value to a form that JSON can represent."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [shown(each) for each in value]
    if isinstance(value, dict):
        return {name: shown(each) for name, each in value.items()}
    if hasattr(value, "__slots__") or hasattr(value, "__dict__"):
        return {name: shown(getattr(value, name)) for name in dir(value) if is_shown(value, name)}
    return value


def is_shown(value: Any, name: str) -> bool:
    return not name.startswith("_") and not callable(getattr(value, name))


async def main(url: str, queue_name: str) -> None:
    loop = asyncio.get_running_loop()
    async with Queue(queue_name, redis_url=url) as queue:
        print(json.dumps({"ready": True}), flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            method, arguments, options = json.loads(line)
            if "every" in options:
                options["repeat"] = RepeatPattern.every(options.pop("every"))
            result = await getattr(queue, method)(*arguments, **options)
            print(json.dumps({"result": shown(result)}), flush=True)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
