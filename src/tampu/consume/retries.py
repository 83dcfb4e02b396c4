"""Decides whether a failed job is retried, and when: `decide`. A task's own rules are asked first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tampu.base.checks import check_delay_ms, invalid
from tampu.consume.handlers import Hold, RemoteError, reason_to_give_up
from tampu.errors import ConfigError
from tampu.wire.dlq import DlqReason
from tampu.wire.retry import backoff_ms

if TYPE_CHECKING:
    from datetime import timedelta

    from tampu.config import ConsumerConfig
    from tampu.wire.job import Job

Errors = type[BaseException] | tuple[type[BaseException], ...]
#: Called with the error and the number of the failed attempt, from 1. True retries by the backoff, False dead-letters
#: the job, and a timedelta or seconds retries after that time. `attempts` stays the limit.
RetryDecision = Callable[[BaseException, int], "bool | timedelta | float"]


class Judgement(NamedTuple):
    """The answer of a task's rules, or of an error's type."""

    #: Why the job is dead-lettered; None if it is retried while attempts are left.
    give_up: DlqReason | None = None
    #: After how long it is retried, in milliseconds; None leaves it to the backoff.
    after_ms: int | None = None


@dataclass(frozen=True)
class RetryRules:
    """The rules of one task."""

    retry_on: tuple[type[BaseException], ...] | None = None
    no_retry_on: tuple[type[BaseException], ...] = ()
    decide: RetryDecision | None = None

    @classmethod
    def of(cls, retry_on: Errors | None, no_retry_on: Errors | None, retry: RetryDecision | None) -> RetryRules | None:
        """Return the rules that a task was given; None if it has none."""
        if retry is not None and (retry_on is not None or no_retry_on is not None):
            raise ConfigError("a task takes either retry, or retry_on and no_retry_on, not both")
        if retry is not None and not callable(retry):
            raise invalid("retry", retry, "a function that takes the error and the attempt's number")
        if retry_on is None and no_retry_on is None and retry is None:
            return None
        return cls(
            None if retry_on is None else _errors("retry_on", retry_on),
            () if no_retry_on is None else _errors("no_retry_on", no_retry_on),
            retry,
        )

    def judge(self, error: Exception, attempt: int) -> Judgement | None:
        """Return what the rules say about an error of the function; None if nothing."""
        if self.decide is not None:
            decision = self.decide(error, attempt)
            if not isinstance(decision, bool):
                return Judgement(after_ms=check_delay_ms(decision, "the value that retry() returned"))
            is_retried = decision
        else:
            is_retried = self.retry_on is None or isinstance(error, self.retry_on)
            is_retried = is_retried and not isinstance(error, self.no_retry_on)
        return None if is_retried else Judgement(DlqReason.UNRECOVERABLE)


def judgement_of(error: BaseException, job: Job[Any]) -> Judgement:
    """Return what the task's rules, which `Target` has asked, or else the type of the error say about it."""
    if isinstance(error, RemoteError):
        return Judgement(error.give_up, error.after_ms)
    if isinstance(error, Hold):  # raised in a process: the worker's answer is in `Runner._raised`
        return Judgement(after_ms=error.after_ms)
    judged, job._judged = getattr(job, "_judged", None), None  # otherwise the error's frames would keep the job
    # Another error comes from a timeout, a hook or a middleware: the rules are about those of the function.
    if judged is not None and judged[0] is error:
        judgement: Judgement = judged[1]
        return judgement
    return Judgement(reason_to_give_up(error, job.id))


def decide(
    error: BaseException,
    job: Job[Any],
    config: ConsumerConfig,
    random_below: Callable[[int], int],
    after_ms: int | None = None,
) -> DlqReason | int:
    """Return why a job that failed with `error` is dead-lettered, or after how many milliseconds it is retried.

    No other code decides about retries. `after_ms` is the delay that the handler asked for.
    """
    give_up, rules_ms = judgement_of(error, job)
    if give_up is not None:
        return give_up
    if job.attempt + 1 >= max_attempts_of(job, config.max_attempts):
        return DlqReason.RETRIES_EXHAUSTED
    asked_ms = rules_ms if after_ms is None else after_ms
    if asked_ms is not None:
        return asked_ms
    spec = job.retry.backoff if job.retry is not None else None
    return backoff_ms(job.attempt + 1, spec, config.retry, random_below)


def max_attempts_of(job: Job[Any], default: int) -> int:
    """Return the total number of runs that a job may have, including the first."""
    own = job.retry.max_attempts if job.retry is not None else None
    return default if own is None else own


def _errors(field: str, errors: Any) -> tuple[type[BaseException], ...]:
    kinds = errors if isinstance(errors, tuple) else (errors,)
    if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
        raise invalid(field, errors, "an exception class or a tuple of them")
    return kinds
