"""Functions for RQ."""

from rq import get_current_job

from bench.program.counter import tick


def nothing(payload):
    tick()


def fails_once(payload):
    job = get_current_job()
    # RQ stores with the job how many retries are left.
    if job.retries_left == 1:
        raise ValueError("first run")
    tick()
