"""python -m sample_project: the API and a worker in one process, for development.

http://127.0.0.1:8000/docs; set PORT to use another port. Without TAMPU_URL it starts a throw-away server.
"""

import asyncio
import contextlib
import os

import uvicorn


async def main() -> None:
    # Imported here: the queue reads TAMPU_URL when it is made.
    from sample_project.api import app
    from sample_project.worker import worker

    config = uvicorn.Config(app, host="127.0.0.1", port=int(os.environ.get("PORT", "8000")))
    async with worker:
        await uvicorn.Server(config).serve()


if __name__ == "__main__":
    os.environ.setdefault("TAMPU_URL", "embedded://")
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again when it has stopped
        asyncio.run(main())
