"""The `tampu` program: finds the command named by the arguments, runs it, and reports an error in one line."""

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
from typer import Option
from typer.core import TyperGroup
from typer.main import get_group

import tampu
from tampu.cli.commands import COMMANDS, Command
from tampu.cli.errors import INTERRUPTED, OK, exit_code_of, line_of, wants_traceback
from tampu.cli.output import printable, use_lenient_streams

if TYPE_CHECKING:
    from collections.abc import Callable

#: Raised by typer for an invalid argument. (The class has no public name in all versions.)
_ArgumentError: Any = typer.BadParameter.__mro__[2]


class ReaderGone(Exception):  # noqa: N818 - names what happened, not a kind of error
    """The process that reads our output has closed the pipe (`| head`)."""


class RootGroup(TyperGroup):
    """Lists every command by name and help line, and imports only the one that runs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[:2] == ["worker", "list"]:  # looks like a subcommand, but `worker` takes targets
            args = ["workers", *args[2:]]
        if args[:1] == ["repeatable"]:  # the name before 0.3
            args = ["schedule", *args[1:]]
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_command(COMMANDS[name]) if name in COMMANDS else None, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # typer would turn this into exit code 1
            raise ReaderGone from error


def load_command(command: Command) -> Any:
    """Import a command and return it as a typer command or group."""
    module, _, attribute = command.target.partition(":")
    found = getattr(import_module(f"tampu.cli.commands.{module}"), attribute)
    holder = typer.Typer(add_completion=False)
    holder.callback()(_do_nothing)  # without a callback, typer collapses a group of one command into that command
    if isinstance(found, typer.Typer):
        for subcommand in found.registered_commands:
            subcommand.callback = spread_options(subcommand.callback) if subcommand.callback else None
        holder.add_typer(found, name=command.name)
    else:
        holder.command(command.name)(spread_options(found))
    return get_group(holder).commands[command.name]


def spread_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace parameters that are dataclasses of options with their fields; those of the first one are placed last."""
    hints = get_type_hints(function, include_extras=True)
    name = next((name for name, hint in reversed(hints.items()) if is_dataclass(hint)), None)
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

    call.__signature__ = Signature([*own, *options])  # type: ignore[attr-defined]  # typer reads this attribute
    call.__annotations__ = hints
    return spread_options(call)


def _do_nothing() -> None:
    pass


app = typer.Typer(
    name="tampu",
    cls=RootGroup,
    help="A job queue on Redis Streams: run workers, inspect queues and repair them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"tampu {tampu.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for command in COMMANDS.values():
    app.command(command.name, help=command.help, rich_help_panel=command.panel)(_do_nothing)


def main() -> None:
    """Run the `tampu` program; always raises SystemExit."""
    _open_missing_streams()
    use_lenient_streams()
    log = logging.StreamHandler()
    log.setFormatter(_OneLine())
    logging.basicConfig(level=logging.WARNING, handlers=[log])
    _warn_of_visible_password(sys.argv[1:])
    sys.exit(run_command(sys.argv[1:]))


def _warn_of_visible_password(arguments: list[str]) -> None:
    """Print a warning if `--url` has a password: other users of the machine see it in the list of processes."""
    pairs = zip(arguments, [*arguments[1:], ""], strict=False)  # without arguments there is one value too many
    urls = [value if name == "--url" else name[6:] for name, value in pairs if name == "--url" or name[:6] == "--url="]
    if not urls:
        return
    from tampu.errors import ConfigError
    from tampu.redis.settings import parse_url

    with contextlib.suppress(ConfigError):
        if any(settings.password or settings.sentinel_password for settings in map(parse_url, urls)):
            _complain("warning: other users can see the password of --url in the process list; set TAMPU_URL instead")


class _OneLine(logging.Formatter):
    """Formats a log record as one line without control characters: its text may come from the server."""

    def format(self, record: logging.LogRecord) -> str:
        return f"tampu: {printable(record.getMessage())}"


def run_command(arguments: list[str]) -> int:
    """Run one command and return its exit code. Any error is printed as one line on stderr."""
    try:
        code = app(arguments, prog_name="tampu", standalone_mode=False)
        sys.stdout.flush()  # here rather than at exit, where a closed pipe would print a traceback
    except (ReaderGone, BrokenPipeError):
        _let_go_of_stdout()
        return OK
    except typer.Abort:  # a prompt was answered with Ctrl-C or end of input
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
        _complain(f"{' '.join(error.format_message().split())}{_origin(error)} (see {path} --help)")
    return int(error.exit_code)


def _origin(error: Any) -> str:
    """Name the environment variable that a refused value came from, if any: the message names only the option."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is None or parameter is None:
        return ""
    source = context.get_parameter_source(parameter.name)
    return f"; set by {parameter.envvar}" if source is not None and source.name == "ENVIRONMENT" else ""


def _complain(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"tampu: {printable(line)}", file=sys.stderr, flush=True)


def _let_go_of_stdout() -> None:
    """Discard output that cannot be written, so that Python does not print a traceback when it exits."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


def _open_missing_streams() -> None:
    """Open /dev/null for a missing stdout or stderr: each is None if it was closed at startup (`>&-`, `2>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - stays open for the life of the process
