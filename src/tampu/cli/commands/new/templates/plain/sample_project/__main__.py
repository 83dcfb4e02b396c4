"""python -m sample_project: add a job of each task, run them here, and print their results.

Without TAMPU_URL it starts a throw-away server.
"""

import asyncio
import os


async def main() -> None:
    # Imported here: the queue reads TAMPU_URL when it is made.
    from sample_project.tasks import count_words, queue, send_welcome
    from sample_project.worker import worker

    async with queue, worker:
        welcome = await send_welcome.add("ada@example.com")
        words = await count_words.add("to be or not to be")
        print(await welcome.result(timeout=30))
        print(await words.result(timeout=30))


if __name__ == "__main__":
    os.environ.setdefault("TAMPU_URL", "embedded://")
    asyncio.run(main())
