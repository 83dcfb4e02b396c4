"""`tampu new`: writes a small working project from `templates/`.

`templates/common` and one of `plain`, `fastapi` and `django` make a project named `sample-project`, with the package
`sample_project`. Nothing is templated but these two names, so the files can be read, linted and run as they are.
"""

import keyword
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from tampu.cli.errors import CliError, UsageError
from tampu.cli.output import show

TEMPLATES = Path(__file__).with_name("templates")
#: The names in the templates, which become those of the project.
SAMPLE_NAME = "sample-project"
SAMPLE_PACKAGE = "sample_project"

MAX_NAME = 40
#: Packages and folders that the project uses itself.
TAKEN = {"deploy", "django", "fastapi", "gunicorn", "httpx", "manage", "pydantic", "pytest", "redis", "tampu"}
TAKEN |= {"tests", "uvicorn"}

#: What `python -m` does in each kind of project.
RUNS = {
    "plain": "run a job of each task and print the results; needs no server",
    "fastapi": "serve http://127.0.0.1:8000/docs with a worker; needs no server",
    "django": "serve http://127.0.0.1:8000/signups with a worker; needs no server",
}


def new(
    name: Annotated[str, Argument(metavar="NAME", help="The project's name, such as shop or mail-room.")],
    fastapi: Annotated[
        bool,
        Option("--fastapi", help="Include a FastAPI application that adds jobs and returns their results and states."),
    ] = False,
    django: Annotated[
        bool, Option("--django", help="Write a Django project that adds jobs when its transactions commit.")
    ] = False,
) -> None:
    """Write a small working project: tasks, a worker, tests, a systemd unit, a Dockerfile and a Compose file.

    The project is written to a new folder with its name. Nothing is overwritten.
    """
    if fastapi and django:
        raise UsageError("--fastapi and --django cannot be combined; choose one")
    check_name(name)
    kind = "fastapi" if fastapi else "django" if django else "plain"
    count = write_project(Path.cwd() / name, kind)
    package = name.replace("-", "_")
    steps = {
        f"cd {name}": "",
        "pip install -e '.[dev]'": "install its dependencies, best in a virtual environment",
        f"python -m {package}": RUNS[kind],
        "python -m pytest": "run its tests",
        f"{'DEBUG=1 ' * django}tampu worker {package}.worker:worker": "run a worker on the server in TAMPU_URL",
    }
    width = max(map(len, steps))
    lines = [f"  {step:<{width}}  {text}".rstrip() for step, text in steps.items()]
    show("\n".join([f"created {name}/ with {count} files", "", *lines, "", f"{name}/README.md has the rest."]))


def check_name(name: str) -> None:
    """Raise `UsageError` unless this can be the name of a folder, a distribution and, with `_` for `-`, a package."""
    package = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*", name) or len(name) > MAX_NAME:
        similar = "-".join(re.findall(r"[a-z0-9]+", name.lower())).lstrip("0123456789-")[:MAX_NAME].rstrip("-")
        hint = f"; try {similar}" if similar else ""
        raise UsageError(
            f"the project's name must be lowercase letters and digits, with single - or _ between them, start with a "
            f"letter and have at most {MAX_NAME} characters; got {name!r}{hint}"
        )
    if keyword.iskeyword(package) or package in sys.stdlib_module_names:
        raise UsageError(f"{name!r} cannot be the project's name: Python has a keyword or module {package!r}")
    if package in TAKEN:
        raise UsageError(f"{name!r} cannot be the project's name: the project uses {package!r} itself")


def write_project(folder: Path, kind: str) -> int:
    """Write a project into a new folder, or an empty one, and return the number of files."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise _exists(folder)
    # Written next to it and renamed: the folder is there whole or not at all, and no file can be overwritten.
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        files = {
            path.relative_to(layer): path
            for layer in (TEMPLATES / "common", TEMPLATES / kind)
            for path in layer.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts  # pip compiles the templates, too
        }
        for relative, source in files.items():
            target = draft / _renamed(str(relative), folder.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_renamed(source.read_text(encoding="utf-8"), folder.name), encoding="utf-8")
        draft.chmod(0o777 & ~_umask())  # a temporary folder is for its owner only
        try:
            draft.rename(folder)
        except OSError as error:
            raise _exists(folder) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return len(files)


def _renamed(text: str, name: str) -> str:
    return text.replace(SAMPLE_NAME, name).replace(SAMPLE_PACKAGE, name.replace("-", "_"))


def _exists(folder: Path) -> CliError:
    return CliError(f"{folder.name} already exists, and nothing is overwritten; choose another name or remove it")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
