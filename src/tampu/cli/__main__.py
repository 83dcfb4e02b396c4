"""Entry point of the `tampu` program, also run by `python -m tampu.cli`.

Importing the rest takes a moment, and Ctrl-C during that moment must print one line and not a traceback. For that
reason this module imports only what Python itself has already loaded.
"""

import os
import sys

#: Equal to `tampu.cli.errors.INTERRUPTED`, which may not be loaded yet.
INTERRUPTED = 130


def leave_current_folder() -> None:
    """Undo what `python -m` does: put the current folder first in the search path, so that its files shadow modules.

    `tampu` and `python -P -m tampu` do not do that. Commands that load an application add the folder again.
    """
    try:
        here = os.getcwd()
    except OSError:  # it was deleted, and Python did not add it
        return
    if not sys.flags.safe_path and sys.path[0] == here:
        del sys.path[0]


def main() -> None:
    """Run the command named by the arguments, then end the process."""
    try:
        from tampu.cli.main import main as run

        run()
    except KeyboardInterrupt:
        os.write(2, b"tampu: interrupted\n")
        os._exit(INTERRUPTED)
    finally:
        _end_at_once_on_interrupt()


def _end_at_once_on_interrupt() -> None:
    """End the process silently if Ctrl-C is pressed during Python's own cleanup: the command is done by then."""
    from signal import SIG_DFL, SIG_IGN, SIGINT, getsignal, signal

    if getsignal(SIGINT) is not SIG_IGN:
        signal(SIGINT, SIG_DFL)


if __name__ == "__main__":
    leave_current_folder()
    main()
