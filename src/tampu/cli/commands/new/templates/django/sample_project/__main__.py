"""python -m sample_project: migrate, then serve the views with a worker, for development.

http://127.0.0.1:8000; set PORT to use another port. Without TAMPU_URL it starts a throw-away server.
DEBUG=0 turns off Django's error pages; then set SECRET_KEY.
"""

import asyncio
import os
import threading

from django.core.management import call_command


def main() -> None:
    # Imported here: the queue reads TAMPU_URL when it is made.
    from sample_project.worker import worker

    call_command("migrate", verbosity=0)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(worker.run(),))
    thread.start()
    try:
        call_command("runserver", f"127.0.0.1:{os.environ.get('PORT', '8000')}", use_reloader=False)
    finally:
        asyncio.run_coroutine_threadsafe(worker.close(), loop).result()
        thread.join()
        loop.close()


if __name__ == "__main__":
    os.environ.setdefault("DEBUG", "1")
    os.environ.setdefault("TAMPU_URL", "embedded://")
    main()
