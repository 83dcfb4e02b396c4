"""The command line: `tampu ...`. Thin: it reads arguments, calls what is below, and shows what came of it."""
