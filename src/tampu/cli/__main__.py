"""Where the program `tampu` starts, also as `python -m tampu.cli`.

Importing the rest takes a moment, in which Ctrl-C must be one line and not a traceback. So only modules that Python
has loaded anyway may be imported at the top.
"""

import os

#: The same as `tampu.cli.errors.INTERRUPTED`, which may not be loaded yet.
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
    """The command is done: a Ctrl-C while Python cleans up ends the process silently."""
    from signal import SIG_DFL, SIGINT, signal

    signal(SIGINT, SIG_DFL)


if __name__ == "__main__":
    main()
