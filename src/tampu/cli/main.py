"""The root of the command line: every command under its name, and every error in one line."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from typing import Annotated, Any

import typer

import tampu
from tampu.cli.catalogue import LoadingGroup, list_in
from tampu.cli.exits import INTERRUPTED, OK, exit_code_of, line_of, wants_traceback
from tampu.cli.output import printable, use_lenient_streams

#: What typer raises for a wrong argument. (The class has no public name in all versions.)
_ArgumentError: Any = typer.BadParameter.__mro__[2]


class ReaderGone(Exception):  # noqa: N818 - what happened, not a kind of error
    """Nobody reads our output any more (`| head`)."""


class QuietRoot(LoadingGroup):
    """Left to typer, a closed pipe would be exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ReaderGone from error


app = typer.Typer(
    name="tampu",
    cls=QuietRoot,
    help="A job queue on Redis Streams: run workers, look into queues, repair them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"auto_envvar_prefix": "TAMPU", "help_option_names": ["--help", "-h"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tampu {tampu.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


list_in(app)


def main() -> None:
    """What the program `tampu` runs; always ends with SystemExit."""
    _open_missing_streams()
    use_lenient_streams()
    logging.basicConfig(level=logging.WARNING, format="tampu: %(message)s")
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run one command; its exit code. Whatever goes wrong is told in one line on stderr."""
    try:
        code = app(arguments, prog_name="tampu", standalone_mode=False)
        sys.stdout.flush()  # here and not at exit, where a closed pipe would be a traceback
    except (ReaderGone, BrokenPipeError):
        _let_go_of_stdout()
        return OK
    except typer.Abort:  # a question that was answered with Ctrl-C or the end of the input
        code = INTERRUPTED
    except _ArgumentError as error:
        return _refuse_arguments(error)
    except (Exception, KeyboardInterrupt) as error:
        if wants_traceback():
            traceback.print_exc()
        _complain(line_of(error))
        _let_go_of_stdout()
        return exit_code_of(error)
    if code == INTERRUPTED:
        _complain("interrupted")
    return code if isinstance(code, int) else OK


def _refuse_arguments(error: Any) -> int:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        path = context.command_path if context is not None else "tampu"
        _complain(f"{' '.join(error.format_message().split())} (see {path} --help)")
    return int(error.exit_code)


def _complain(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"tampu: {printable(line)}", file=sys.stderr, flush=True)


def _let_go_of_stdout() -> None:
    """What is still in the buffer and cannot be written must not become a traceback when Python ends."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


def _open_missing_streams() -> None:
    """Started with a closed stdout or stderr (`>&-`), Python has none: then what is written goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives
