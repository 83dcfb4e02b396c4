"""Loads the targets of `tampu worker`: Queues or a Worker as `module:attribute`, or a module with Queues."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tampu.base.targets import TargetError, import_module_from_cwd, load_target
from tampu.cli.errors import CliError, UsageError
from tampu.queue import Queue
from tampu.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


def load(targets: Sequence[str]) -> Worker | list[Queue]:
    """Return what the targets name: one Worker, or all their queues without duplicates."""
    found = [_load_one(target) for target in targets]
    if len(found) == 1 and isinstance(found[0], Worker):
        return found[0]
    queues: list[Queue] = []
    for target, one in zip(targets, found, strict=True):
        if isinstance(one, Worker):
            raise UsageError(f"{target} is a Worker, which cannot be combined with other targets")
        queues += [queue for queue in one if not any(queue is known for known in queues)]
    return queues


def _load_one(target: str) -> Worker | list[Queue]:
    try:
        if ":" not in target and (queues := _queues_of(target)):
            return queues
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
    raise UsageError(f"{target} is {_described(found)}; expected a Queue, a list of Queues or a Worker{others}")


def _queues_of(module_name: str) -> list[Queue]:
    """Return all queues with tasks in a module, each once."""
    if not all(part.isidentifier() for part in module_name.split(".")):
        return []  # such as a path, which `load_target` explains
    found = [value for value in vars(import_module_from_cwd(module_name)).values() if isinstance(value, Queue)]
    return [queue for queue in dict.fromkeys(found) if queue.tasks]


def _candidates(module: ModuleType | None) -> str:
    if module is None:
        return ""
    names = [name for name, value in vars(module).items() if isinstance(value, Queue | Worker)]
    if not names:
        return "; the module has no Queue or Worker"
    return f"; the module has {', '.join(f'{module.__name__}:{name}' for name in names[:8])}"


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, list | tuple | set):
        return f"an empty {type(value).__name__}" if not value else f"a {type(value).__name__} with other values"
    return f"a {type(value).__name__}"
