"""The command line, `tampu ...`: parses arguments, calls the packages below, and prints the result.

The commands are in `commands/`; the table in its `__init__.py` maps each command to its module. The modules in this
folder are shared by all commands: `main` runs the command and turns errors into one line and an exit code, `session`
connects to the server, `options`, `output`, `tables` and `units` read arguments and print results.

What they show of a queue comes from `tampu.inspect`: `QueueAdmin` reads and changes it, `views` redacts it and turns it
into JSON.

To add a command:

1. Write a function in a file of `commands/` whose parameters are typer's arguments and options. Its docstring is the
   help text. If it talks to a server, its first parameter is `common: CommonOptions`, which adds --json, --url and
   --timeout; `common.run(work, ...)` calls `work(session, ...)`. For subcommands, define a `typer.Typer` named `app`.
2. Add a line to the table in `commands/__init__.py`.
3. Add tests in `tests/cli/`.
"""
