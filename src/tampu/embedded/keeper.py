"""The keeper of an embedded server: starts it, and stops it when the last process that uses it has ended.

`server.py` runs it as a separate program, with only the standard library, so that it starts in 10 ms:

    python -I -S keeper.py USERS_LOCK STATE_FILE SOCKET_FOLDER THROW_AWAY_FOLDER SERVER [ARGUMENT...]

Every process that uses the server holds a shared lock on USERS_LOCK. The keeper waits for an exclusive lock, which it
gets when all of them have ended in any way: the kernel releases the locks of a killed process. The alternatives fall
short: a parent-death signal follows the thread that started the server, not the process, and exists on Linux only; a
pipe only notices the end of the process that created it, while another may be using the server by then.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import threading


def main(users_lock: str, state_file: str, socket_folder: str, throw_away_folder: str, *command: str) -> None:
    os.umask(0o077)  # the append-only files hold every payload: only this user may read them
    os.setsid()  # Ctrl-C in the terminal is for the program, which may need its server to shut down cleanly
    # The server inherits the lock that this process was started with; see `tampu.embedded.server`.
    server = os.posix_spawn(command[0], command, os.environ)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(server, signal.SIGTERM))
    unused = threading.Event()
    threading.Thread(target=_end_when_unused, args=(users_lock, server, unused), daemon=True).start()
    os.waitpid(server, 0)
    if os.path.exists(state_file):
        os.unlink(state_file)
    if socket_folder:
        shutil.rmtree(socket_folder, ignore_errors=True)
    # If the server ended on its own, it still has users, who may want to read its log.
    if throw_away_folder and unused.is_set():
        shutil.rmtree(throw_away_folder, ignore_errors=True)


def _end_when_unused(users_lock: str, server: int, unused: threading.Event) -> None:
    # Never closed: a process that comes while the server is stopping must wait until this process has ended too.
    fcntl.flock(os.open(users_lock, os.O_RDWR), fcntl.LOCK_EX)
    unused.set()
    os.kill(server, signal.SIGTERM)


if __name__ == "__main__":
    main(*sys.argv[1:])
