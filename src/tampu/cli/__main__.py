"""Entry point of the `tampu` program, also run by `python -m tampu.cli`.

Importing the rest takes a moment, and Ctrl-C during that moment must print one line and not a traceback. For that
reason this module imports only what Python itself has already loaded.
"""

import os

#: Equal to `tampu.cli.errors.INTERRUPTED`, which may not be loaded yet.
INTERRUPTED = 130


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
    from signal import SIG_DFL, SIGINT, signal

    signal(SIGINT, SIG_DFL)


if __name__ == "__main__":
    main()
