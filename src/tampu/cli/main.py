"""The program `tampu`: finds the command that the arguments name, runs it, and reports an error in one line."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from dataclasses import fields, is_dataclass
from functools import wraps
from importlib import import_module
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup
from typer.main import get_group

import tampu
from tampu.cli.commands import COMMANDS, Command
from tampu.cli.errors import INTERRUPTED, OK, exit_code_of, line_of, wants_traceback
from tampu.cli.output import printable, use_lenient_streams

if TYPE_CHECKING:
    from collections.abc import Callable

#: What typer raises for a wrong argument. (The class has no public name in all versions.)
_ArgumentError: Any = typer.BadParameter.__mro__[2]


class ReaderGone(Exception):  # noqa: N818 - what happened, not a kind of error
    """The reader of our output has closed the pipe (`| head`)."""


class RootGroup(TyperGroup):
    """Knows every command's name and help line; imports the one that is run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_command(COMMANDS[name]) if name in COMMANDS else None, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # left to typer, this would be exit code 1
            raise ReaderGone from error


def load_command(command: Command) -> Any:
    """Import a command and return it as typer's command or group."""
    module, _, attribute = command.target.partition(":")
    found = getattr(import_module(f"tampu.cli.commands.{module}"), attribute)
    holder = typer.Typer(add_completion=False)
    holder.callback()(_do_nothing)  # without a callback, typer would turn a holder of one command into that command
    if isinstance(found, typer.Typer):
        for subcommand in found.registered_commands:
            subcommand.callback = spread_options(subcommand.callback) if subcommand.callback else None
        holder.add_typer(found, name=command.name)
    else:
        holder.command(command.name)(spread_options(found))
    return get_group(holder).commands[command.name]


def spread_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a parameter that is a dataclass of options, such as `CommonOptions`, by its fields, behind the others."""
    hints = get_type_hints(function, include_extras=True)
    name = next((name for name, hint in hints.items() if is_dataclass(hint)), None)
    if name is None:
        return function
    group: Any = hints.pop(name)
    hints |= get_type_hints(group, include_extras=True)
    own = [
        parameter.replace(annotation=hints[parameter.name])
        for parameter in signature(function).parameters.values()
        if parameter.name != name
    ]
    options = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in fields(group)
    ]

    @wraps(function)
    def call(**given: Any) -> Any:
        values = {option.name: given.pop(option.name) for option in options}
        return function(**given, **{name: group(**values)})

    call.__signature__ = Signature([*own, *options])  # type: ignore[attr-defined]  # what typer reads
    call.__annotations__ = hints
    return call


def _do_nothing() -> None:
    pass


app = typer.Typer(
    name="tampu",
    cls=RootGroup,
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


for command in COMMANDS.values():
    app.command(command.name, help=command.help, rich_help_panel=command.panel)(_do_nothing)


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
