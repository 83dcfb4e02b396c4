"""A task's own rules about retries: which errors are worth another attempt, and after how long."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tampu.base.checks import check_delay_ms, invalid
from tampu.consume.handlers import GiveUp, RetryAfter
from tampu.errors import ConfigError

if TYPE_CHECKING:
    from datetime import timedelta

    from tampu.wire.job import Job

Errors = type[BaseException] | tuple[type[BaseException], ...]
#: Called with the error and the number of the failed attempt, from 1. True retries by the backoff, False dead-letters
#: the job, and a timedelta or seconds retries after that time. `attempts` stays the limit.
RetryDecision = Callable[[BaseException, int], "bool | timedelta | float"]


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

    def applied(self, error: Exception, attempt: int) -> BaseException:
        """Return what to raise instead of `error`: itself for a usual retry, `GiveUp` or `RetryAfter`."""
        if self.decide is not None:
            decision = self.decide(error, attempt)
            if isinstance(decision, bool):
                return error if decision else GiveUp(error)
            return RetryAfter(error, check_delay_ms(decision, "the value that retry() returned"))
        is_wanted = self.retry_on is None or isinstance(error, self.retry_on)
        return error if is_wanted and not isinstance(error, self.no_retry_on) else GiveUp(error)


def with_rules(call: Callable[[Job[Any]], Any], rules: RetryRules | None) -> Callable[[Job[Any]], Any]:
    """Return `call` with its errors judged by the rules. An awaitable result is judged when it is awaited."""
    if rules is None:
        return call

    async def awaited(result: Any, attempt: int) -> Any:
        try:
            return await result
        except Exception as error:
            raise_judged(rules, error, attempt)

    def judged(job: Job[Any]) -> Any:
        try:
            result = call(job)
        except Exception as error:
            raise_judged(rules, error, job.attempt + 1)
        return awaited(result, job.attempt + 1) if inspect.isawaitable(result) else result

    return judged


def raise_judged(rules: RetryRules, error: Exception, attempt: int) -> None:
    """Raise the error, or what stands for it."""
    judged = rules.applied(error, attempt)
    if judged is error:
        raise error
    raise judged from error


def _errors(field: str, errors: Any) -> tuple[type[BaseException], ...]:
    kinds = errors if isinstance(errors, tuple) else (errors,)
    if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
        raise invalid(field, errors, "an exception class or a tuple of them")
    return kinds
