"""Where the program `tampu` begins. It loads the rest under a guard: Ctrl-C meanwhile is one line, not a traceback.

Only what Python has loaded anyway may be imported at the top.
"""

import os

#: As `tampu.cli.exits.INTERRUPTED`, which may not be loaded yet.
INTERRUPTED = 130


def main() -> None:
    """Run the command that the arguments name; ends the process."""
    try:
        from tampu.cli.main import main as run

        run()
    except KeyboardInterrupt:
        os.write(2, b"tampu: interrupted\n")
        os._exit(INTERRUPTED)
    finally:
        _end_at_once_on_interrupt()


def _end_at_once_on_interrupt() -> None:
    """The command is done: from now on Ctrl-C ends Python's own clearing up, without a word."""
    from signal import SIG_DFL, SIGINT, signal

    signal(SIGINT, SIG_DFL)
