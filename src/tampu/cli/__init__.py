"""The command line, `tampu ...`: reads arguments, calls the packages below, and shows the result.

`commands/` has the commands; the table in its `__init__.py` says which module has which. The modules beside it are what
they share:

| module | what it does |
|---|---|
| `main` | runs the command that the arguments name, and turns errors into one line and an exit code |
| `options` | options and arguments that several commands have, and the question before something is destroyed |
| `session` | `CommonOptions` and `Session`, a command's connection to the server |
| `output`, `tables` | lines, JSON, progress bars; tables that fit the terminal |
| `units`, `payloads` | durations, sizes and times; payloads and results as JSON and as text |
| `errors`, `logs` | exit codes and error lines; logs of commands that run for long |

To add a command:

1. Write `commands/NAME.py` with a function whose parameters are typer's arguments and options. Its docstring is the
   help. If it talks to a server, its first parameter is `common: CommonOptions`, which gives it --json, --url and
   --timeout; `common.run(work, ...)` calls `work(session, ...)`. For subcommands, write a `typer.Typer` named `app`.
2. Add a line to the table in `commands/__init__.py`.
3. Add tests in `tests/cli/`.
"""
