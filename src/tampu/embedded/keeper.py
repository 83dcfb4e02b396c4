"""The keeper of an embedded server: starts it, and ends it when the last process that uses it has ended.

Run as a program of its own by `server.py` beside it, with nothing but the standard library, so that it starts in 10 ms:

    python -I -S keeper.py USERS_LOCK STATE_FILE THROW_AWAY_FOLDER SERVER [ARGUMENT...]

Every process that uses the server holds a shared lock on USERS_LOCK; the keeper asks for an exclusive one and gets it
when they are all gone, however they ended: the kernel drops the locks of a killed process. The alternatives fall short:
a death signal follows the thread that started the server, not the process, and exists on Linux only; a pipe knows only
the process that made it, while another may use the server by now.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import threading


def main(users_lock: str, state_file: str, throw_away_folder: str, *command: str) -> None:
    os.setsid()  # a Ctrl-C in the terminal is for the program, which may need its server to come to an orderly end
    # The server inherits the lock on itself that this process was started with, see `tampu.embedded.server`.
    server = os.posix_spawn(command[0], command, os.environ)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(server, signal.SIGTERM))
    unused = threading.Event()
    threading.Thread(target=_end_when_unused, args=(users_lock, server, unused), daemon=True).start()
    os.waitpid(server, 0)
    if os.path.exists(state_file):
        os.unlink(state_file)
    # A server that ended by itself has users still, who may want to read its log.
    if throw_away_folder and unused.is_set():
        shutil.rmtree(throw_away_folder, ignore_errors=True)


def _end_when_unused(users_lock: str, server: int, unused: threading.Event) -> None:
    # Never closed: who comes while the server is ending has to wait until this process has ended too.
    fcntl.flock(os.open(users_lock, os.O_RDWR), fcntl.LOCK_EX)
    unused.set()
    os.kill(server, signal.SIGTERM)


if __name__ == "__main__":
    main(*sys.argv[1:])
