"""Loads the object named by `module:attribute`, such as `app:queue`, from the current folder or installed packages."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

from tampu.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType


#: Set by `manage.py tampu`: call `django.setup()` before a module of the user is imported.
DJANGO_VARIABLE = "TAMPU_DJANGO_SETUP"


class TargetError(ConfigError):
    """A target does not exist. `module` is the module that lacks the attribute, if it could be imported."""

    def __init__(self, message: str, module: ModuleType | None = None) -> None:
        super().__init__(message)
        self.module = module


def load_target(target: str) -> Any:
    """Return the object named by `module:attribute`; the attribute may contain dots.

    Raises TargetError if there is no such object, and ImportError if the module cannot be imported.
    """
    module_name, _, attribute = target.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        written = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise TargetError(f"{target!r} is a path; use the module name: {written}:{attribute or 'queue'}")
    if not module_name or not all(part.isidentifier() for part in module_name.split(".")):
        raise TargetError(f"{target!r} is not of the form module:attribute, such as app:queue")
    module = import_module_from_cwd(module_name)
    if not attribute:
        raise TargetError(f"{target!r} names only a module; add an attribute: {module_name}:NAME", module)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise TargetError(f"module {module_name!r} has no {attribute!r}{_similar(part, found)}", module)
        found = getattr(found, part)
    return found


def import_module_from_cwd(name: str) -> ModuleType:
    """Import a module from the current folder, or else from the installed packages.

    Raises TargetError if there is no such module, and ImportError with a one-line message if importing it fails.
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    if name.partition(".")[0] in sys.stdlib_module_names:
        raise TargetError(f"{name!r} is the name of a standard-library module; rename your file")
    importlib.invalidate_caches()
    try:
        if os.environ.get(DJANGO_VARIABLE):
            importlib.import_module("django").setup()
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (name == missing or name.startswith(f"{missing}.")):
            raise TargetError(f"no module {missing!r} in {here} or the installed packages") from error
        raise ImportError(f"importing {name} failed: {_described(error)}", name=name) from error


def _described(error: BaseException) -> str:
    """Return an error with its location in the user's code."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    # The innermost frame outside Python's import machinery.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{type(error).__name__}: {error}{place}"


def _similar(name: str, owner: Any) -> str:
    close = difflib.get_close_matches(name, [known for known in dir(owner) if not known.startswith("_")], 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
