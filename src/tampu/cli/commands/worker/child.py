"""One worker process: imports the app, runs its Worker, reports to the supervisor.

SIGTERM drains: the worker takes no new jobs and finishes those that are running. More of them change nothing, because a
process manager may signal the whole process group; only the supervisor's request abandons the running jobs. SIGINT and
SIGHUP are ignored for the same reason. If the supervisor dies for any reason, the process drains too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from tampu.base.event_loop import new_event_loop
from tampu.base.targets import TargetError, import_module_from_cwd, load_target
from tampu.cli.commands.worker.protocol import ABANDON, ASK_METRICS, Link, Report, ThreadLink, WorkerPlan
from tampu.cli.errors import ERROR, OK, CliError, UsageError, exit_code_of, line_of, wants_traceback
from tampu.cli.output import fields, set_up_logs, use_lenient_streams
from tampu.consume.processes import kill_group
from tampu.errors import RedisError
from tampu.metrics import noop_sink
from tampu.queue import Queue
from tampu.redis.client import Client
from tampu.redis.faults import Unreachable
from tampu.redis.settings import parse_url
from tampu.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from tampu.wire.job import Job

logger = logging.getLogger("tampu.cli.worker")

#: How often a child sends a report, in seconds.
REPORT_SECS = 0.25
#: How long to wait for the server before logging a warning, in seconds.
SERVER_PATIENCE_SECS = 2.0


def main() -> None:
    """Run `python -m tampu.cli.commands.worker.child PLAN FD NUMBER`, then end the process."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGHUP))  # blocked by the supervisor at the start
    signal.signal(signal.SIGTERM, lambda *_: os._exit(OK))  # until there is a worker to drain
    plan = msgspec.json.decode(sys.argv[1], type=WorkerPlan)
    use_lenient_streams()
    set_up_logs(plan.log_format, plan.log_level, f"worker-{sys.argv[3]}")
    try:
        worker = build_worker(plan)
    except Exception as error:
        if wants_traceback():
            traceback.print_exception(error)
        logger.error("%s", line_of(error))
        _end(exit_code_of(error))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        code = runner.run(_serve(worker, plan, socket.socket(fileno=int(sys.argv[2]))))
        _end(code)


def _end(code: int) -> None:
    """Exit at once, without waiting for threads of abandoned handlers."""
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    for process in multiprocessing.active_children():
        kill_group(process)
    os._exit(code)


def build_worker(plan: WorkerPlan) -> Worker:
    """Return the Worker that a plan describes."""
    found = load(plan.targets)
    sink = _metrics_sink() if plan.metrics else None
    if not isinstance(found, Worker):
        metrics = {} if sink is None else {"metrics": sink}
        return Worker(found, after_job=_job_log(plan.log_jobs), **plan.settings, **metrics)
    if plan.settings:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in plan.settings)
        raise UsageError(f"{plan.targets[0]} is a Worker with its own settings: leave out {given}")
    if sink is not None and found.config.metrics is noop_sink():
        found.config = replace(found.config, metrics=sink)
    return found


def _metrics_sink() -> Any:
    """Return a Prometheus sink, or None if prometheus_client is not installed."""
    if find_spec("prometheus_client") is None:
        return None
    from tampu.prometheus import PrometheusSink

    return PrometheusSink()


def _job_log(which: str) -> Callable[[Job[Any], BaseException | None], None] | None:
    """Set which jobs are logged. For `all`, return a hook that logs completed jobs: the worker logs only failures."""
    job_logger = logging.getLogger("tampu.job")
    if which == "none":
        job_logger.setLevel(logging.CRITICAL)
    if which != "all":
        return None

    def after_job(job: Job[Any], error: BaseException | None) -> None:
        if error is None:
            about = fields(event="completed", task=job.name, job_id=job.id, attempt=job.attempt + 1)
            job_logger.info("%s %s succeeded: attempt %d", job.name, job.id, job.attempt + 1, extra=about)

    return after_job


async def _serve(worker: Worker, plan: WorkerPlan, end: socket.socket) -> int:
    reports = ThreadLink(end)
    serving = _Serving(worker, reports)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, serving.stop)
    threading.Thread(target=serving.report, name="tampu-reports", daemon=True).start()
    beside = [loop.create_task(serving.listen(await Link.over(end))), loop.create_task(_say_if_no_server(worker))]
    queues = ", ".join(queue.name for queue in worker.queues)
    logger.info(
        "worker started: queues %s; concurrency %d", queues, worker.config.concurrency, extra=fields(queues=worker.name)
    )
    try:
        await worker.run()
    except Exception as error:
        logger.error("worker failed: %s", line_of(error), exc_info=None if isinstance(error, RedisError) else error)
        return ERROR
    finally:
        serving.is_over.set()
        for task in beside:
            task.cancel()
    if worker.abandoned:  # the worker has logged it
        return ERROR
    logger.info("worker stopped")
    return OK


class _Serving:
    """A running worker and its reports to the supervisor."""

    def __init__(self, worker: Worker, reports: ThreadLink) -> None:
        self._worker = worker
        self._reports = reports
        self._state = "running"
        self._closing: asyncio.Task[None] | None = None
        self.is_over = threading.Event()
        self._reports.send(self._report("imported"))

    def stop(self) -> None:
        """Drain."""
        if self._closing is None:
            self._state = "draining"
            logger.info("stopping: waiting for running jobs to finish")
            self._closing = asyncio.get_running_loop().create_task(self._worker.close())

    def abandon(self) -> None:
        """End without the running jobs. If there are none, the worker is about to end: let it write their outcomes."""
        jobs = self._worker.running_jobs()
        if not jobs:
            return
        idle_secs = self._worker.config.claim_min_idle_ms / 1000
        for job in jobs:
            about = fields(event="abandoned", task=job.name, job_id=job.id, attempt=job.attempt + 1)
            logger.warning("abandoned %s %s on attempt %d", job.name or "job", job.id, job.attempt + 1, extra=about)
        logger.error("abandoned the running jobs; other workers will retry them after %g s", idle_secs)
        _end(ERROR)

    def report(self) -> None:
        """Send a report at a fixed interval, in a thread: reports continue while a handler blocks the event loop."""
        while not self.is_over.wait(REPORT_SECS):
            self._reports.send(self._report(self._state))

    async def listen(self, link: Link) -> None:
        """Answer requests. If the supervisor dies, drain: nothing else would restart or stop this process."""
        async for line in link.lines():
            if line == ASK_METRICS:
                answer = self._report(self._state)
                answer.metrics = _metrics_text()
                self._reports.send(answer)
            elif line == ABANDON:
                self.abandon()
        if self._closing is None:
            logger.warning("the supervisor has died")
            self.stop()

    def _report(self, state: str) -> Report:
        config = self._worker.config
        blocked = self._worker.blocked
        return Report(
            state=state,
            blocked_secs=0.0 if blocked is None else blocked.secs,
            blocked_by="" if blocked is None else str(blocked),
            silent_secs=self._worker.seconds_since_last_read(),
            is_healthy=self._worker.is_healthy,
            block_secs=config.block_ms / 1000,
            deadline_secs=config.shutdown_deadline_secs,
            queues=self._worker.name.split(","),
            connections=self._worker.connections,
            slots=config.concurrency,
            slots_used={name: used for name, used in self._worker.slots_used.items() if used},
        )


def _metrics_text() -> str:
    """Return this process's metrics in the Prometheus text format, or an empty string without prometheus_client."""
    try:
        from prometheus_client import generate_latest
    except ImportError:
        return ""
    return generate_latest().decode()


async def _say_if_no_server(worker: Worker) -> None:
    """Log a warning if a server is not reachable: the worker waits for it indefinitely."""
    started = time.monotonic()
    for queue in {queue.url: queue for queue in worker.queues}.values():  # one of each server
        client = Client(parse_url(queue.url, credential_provider=queue._credential_provider), queue.keys.tag.encode())
        with contextlib.suppress(RedisError):  # the worker fails with the same error
            try:
                await client.up(SERVER_PATIENCE_SECS)
            except Unreachable as error:
                logger.warning("queue %s: server not reachable, waiting for it: %s", queue.name, error)
                await client.up(3600 * 24)
                logger.info("queue %s: connected after %.0f s", queue.name, time.monotonic() - started)
            finally:
                await client.close()


# --- targets: Queues or a Worker as `module:attribute`, or a module with Queues


def load(targets: Sequence[str]) -> Worker | list[Queue]:
    """Return what the targets name: one Worker, or all their queues without duplicates."""
    found = [_load_one(target) for target in targets]
    if len(found) == 1 and isinstance(found[0], Worker):
        return found[0]
    queues: list[Queue] = []
    for target, part in zip(targets, found, strict=True):
        if isinstance(part, Worker):
            raise UsageError(f"{target} is a Worker, which cannot be combined with other targets")
        queues += [queue for queue in part if not any(queue is known for known in queues)]
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


if __name__ == "__main__":
    main()
