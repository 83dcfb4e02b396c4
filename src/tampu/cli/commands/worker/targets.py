"""Loads what `tampu worker` serves: a Queue, several, or a Worker, each named as `module:attribute`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tampu.base.targets import TargetError, load_target
from tampu.cli.errors import CliError, UsageError
from tampu.queue import Queue
from tampu.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


def load(targets: Sequence[str]) -> Worker | list[Queue]:
    """Return what these targets name together: one Worker, or all their queues, each once."""
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
    try:
        found = load_target(target)
    except TargetError as error:
        raise UsageError(str(error) + _candidates(error.module)) from error
    except ImportError as error:
        raise CliError(str(error)) from error
    if isinstance(found, Worker):
        return found
    if isinstance(found, Queue):
        return [found]
    if isinstance(found, list | tuple | set) and found and all(isinstance(one, Queue) for one in found):
        return list(found)
    others = _candidates(sys.modules[target.partition(":")[0]])
    raise UsageError(f"{target} is {_described(found)}, not a Queue, a list of Queues or a Worker{others}")


def _candidates(module: ModuleType | None) -> str:
    if module is None:
        return ""
    names = [name for name, value in vars(module).items() if isinstance(value, Queue | Worker)]
    if not names:
        return "; it has no Queue and no Worker"
    return f"; it has {', '.join(f'{module.__name__}:{name}' for name in names[:8])}"


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, list | tuple | set):
        return f"an empty {type(value).__name__}" if not value else f"a {type(value).__name__} of other things"
    return f"a {type(value).__name__}"
