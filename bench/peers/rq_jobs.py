"""RQ's functions."""

from rq import get_current_job

from bench.program.counter import tick


def nothing(payload):
    tick()


def fails_once(payload):
    job = get_current_job()
    # Kept with the job: RQ counts down what is left.
    if job.retries_left == 1:
        raise ValueError("first run")
    tick()
