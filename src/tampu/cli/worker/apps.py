"""Finds what `module:attribute` names: a Queue, several, or a Worker. Whatever is wrong with it is said in one line."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import sysconfig
import traceback
from typing import TYPE_CHECKING, Any

from tampu.cli.exits import CliError, UsageError
from tampu.queue import Queue
from tampu.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

_WANTED = "a Queue, a list of Queues or a Worker"


def load(targets: Sequence[str]) -> Worker | list[Queue]:
    """What these targets name together: one Worker, or all their queues, each once."""
    found = [_load_one(target) for target in targets]
    if len(found) == 1 and isinstance(found[0], Worker):
        return found[0]
    queues: list[Queue] = []
    for target, one in zip(targets, found, strict=True):
        if isinstance(one, Worker):
            raise UsageError(f"{target} is a Worker, which runs alone: name it only, or name queues")
        queues += [queue for queue in one if not any(queue is known for known in queues)]
    return queues


def _load_one(target: str) -> Worker | list[Queue]:
    module_name, colon, attribute = target.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        written = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise UsageError(f"{target!r} is a path: write the module's name, {written}:{attribute or 'queue'}")
    if not module_name or not all(part.isidentifier() for part in module_name.split(".")):
        raise UsageError(f"{target!r} is no module:attribute, such as app:queue")
    module = import_app(module_name)
    if not colon or not attribute:
        raise UsageError(f"{target!r} names a module only: write {module_name}:NAME; {_candidates(module)}")
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(
                f"module {module_name!r} has no {attribute!r}{_similar(part, found)}; {_candidates(module)}"
            )
        found = getattr(found, part)
    if isinstance(found, Worker):
        return found
    if isinstance(found, Queue):
        return [found]
    if isinstance(found, list | tuple | set) and found and all(isinstance(one, Queue) for one in found):
        return list(found)
    raise UsageError(f"{target} is {_described(found)}, not {_WANTED}; {_candidates(module)}")


def import_app(name: str) -> ModuleType:
    """A module of the user's, looked for in the current folder before all that is installed."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(_behind_the_standard_library(), here)
    if name.partition(".")[0] in sys.stdlib_module_names:
        raise UsageError(f"{name!r} is a module of Python's own, which a file of that name cannot replace: rename it")
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"there is no module {error.name!r} in {here} or among the installed ones") from error
        raise _failed(name, error) from error
    except (Exception, SystemExit) as error:
        raise _failed(name, error) from error


def _behind_the_standard_library() -> int:
    """The place in `sys.path` where the user's modules come before installed ones, but not before Python's own.

    A file named queue.py there would break every process that has yet to import Python's queue: those of
    `process=True` tasks take over this path before they import anything.
    """
    own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *_extension_folders()}
    return max((place + 1 for place, folder in enumerate(sys.path) if folder in own), default=0)


def _extension_folders() -> set[str]:
    """Where Python's own modules that are written in C are."""
    return {folder for folder in sys.path if folder.endswith("lib-dynload")}


def _failed(name: str, error: BaseException) -> CliError:
    place = ""
    if isinstance(error, SyntaxError):
        place = f" ({error.filename}, line {error.lineno})"
        text = f"SyntaxError: {error.msg}"
    else:
        # The innermost line of what is not Python's own importing.
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        if len(frames) > 1:
            place = f" ({frames[-1].filename}, line {frames[-1].lineno})"
        text = f"{type(error).__name__}: {error}"
    return CliError(f"importing {name} failed: {text}{place}")


def _candidates(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, Queue | Worker)]
    if not names:
        return "it has no Queue and no Worker"
    return f"it has {', '.join(f'{module.__name__}:{name}' for name in names[:8])}"


def _similar(name: str, owner: Any) -> str:
    close = difflib.get_close_matches(name, [known for known in dir(owner) if not known.startswith("_")], 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, list | tuple | set):
        return f"an empty {type(value).__name__}" if not value else f"a {type(value).__name__} of other things"
    return f"a {type(value).__name__}"
