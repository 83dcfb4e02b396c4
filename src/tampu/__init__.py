"""tampu: a job queue and message broker on Redis Streams and MessagePack, wire-compatible with ChasquiMQ and RSMQ.

Names are loaded on first use: a web process that only adds jobs does not load the worker, and a command that only
prints its help does not load a Redis client. `__init__.pyi` lists the names and the modules they come from.
"""

# Not `from __future__ import annotations`: `python -m tampu` would import __future__.py from the current folder.
from importlib import import_module

__version__ = "0.2.0"

#: Module of each public name, read from the lines `from module import name as name` of the stub.
_MODULES: dict[str, str] = {}
with open(f"{__file__}i") as _stub:  # not pathlib or re: importing them would double the time of this import
    for _words in map(str.split, _stub):
        if _words[:1] == ["from"]:
            _MODULES[_words[3]] = _words[1]
__all__ = [*_MODULES, "version"]


def version() -> str:
    """Return the version of this package."""
    return __version__


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'tampu' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
