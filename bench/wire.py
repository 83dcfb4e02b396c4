"""Times the codecs, one call at a time: `make bench-wire`.

Prints microseconds per call, the best of several repeats. Exits with 1 if encoding or decoding one envelope takes
2 microseconds or more.
"""

from __future__ import annotations

import os
import sys
import timeit
from typing import TYPE_CHECKING, Any

from tampu.wire import decode_delayed_member, decode_job, encode_delayed_member, encode_job
from tampu.wire.envelope import encode_envelope
from tampu.wire.job import Job
from tampu.wire.payload import encode_slot
from tampu.wire.retry import BackoffSpec, JobRetryOverride
from tampu.wire.ulid import RANDOM_BYTES, encode_ulid, encode_ulids

if TYPE_CHECKING:
    from collections.abc import Callable

#: Maximum time for one envelope, in microseconds.
BAR_US = 2.0

#: Rounds over all codecs, and calls per codec and round. Rounds are short, because a busy machine is slow for whole
#: seconds at a time; if a target is missed, more rounds follow.
ROUNDS = 40
MORE_ROUNDS = 160
CALLS = 2_000
BULK = 256

PAYLOAD = {
    "to": "ada@example.com",
    "subject": "Welcome aboard",
    "template": "welcome-v2",
    "user_id": 1234567,
    "tags": ["new", "trial"],
    "html": True,
    "ref": "c7",
}


def codecs() -> dict[str, tuple[Callable[[], Any], int, bool]]:
    """Return for each name: a call, the number of items it processes, and whether it has a target."""
    job = Job("01M7GA6SF90W0P6H8NHCB3RCZJ", "welcome", PAYLOAD, 0, 1794770167273)
    retried = job.with_retry(JobRetryOverride(5, BackoffSpec.exponential(200, max_ms=10_000)))
    envelope, retried_envelope = encode_job(job), encode_job(retried)
    member = encode_delayed_member(job.name, envelope)
    random, much_random = os.urandom(RANDOM_BYTES), os.urandom(RANDOM_BYTES * BULK)
    now_ms = job.created_at_ms
    return {
        "envelope: encode, including the payload": (
            lambda: encode_envelope(job.id, encode_slot(PAYLOAD), now_ms),
            1,
            True,
        ),
        "envelope: encode an existing job": (lambda: encode_job(job), 1, True),
        "envelope: decode": (lambda: decode_job(envelope), 1, True),
        "envelope: decode, including the payload": (lambda: decode_job(envelope).payload, 1, False),
        "envelope with a retry override: encode": (lambda: encode_job(retried), 1, False),
        "envelope with a retry override: decode": (lambda: decode_job(retried_envelope), 1, False),
        "delayed member: encode": (lambda: encode_delayed_member("welcome", envelope), 1, False),
        "delayed member: decode": (lambda: decode_delayed_member(member), 1, False),
        "ulid": (lambda: encode_ulid(now_ms, random), 1, False),
        f"ulid, in batches of {BULK}, each": (lambda: encode_ulids(now_ms, much_random), BULK, False),
    }


def main() -> int:
    timed = codecs()
    best_us = dict.fromkeys(timed, float("inf"))

    def run(rounds: int) -> list[str]:
        """Time all codecs for this many more rounds; return those that miss the target."""
        for _ in range(rounds):
            for name, (call, per_call, _barred) in timed.items():
                calls = max(CALLS // per_call, 1)
                best_us[name] = min(best_us[name], timeit.timeit(call, number=calls) / calls / per_call * 1e6)
        return [name for name, (_call, _per_call, barred) in timed.items() if barred and best_us[name] >= BAR_US]

    missed = run(ROUNDS) and run(MORE_ROUNDS)
    print(f"payload of {len(encode_slot(PAYLOAD)) - 2} bytes; microseconds per call, best of all rounds")
    for name, cost_us in best_us.items():
        bar = f"   target {BAR_US:g}: {'MISSED' if name in missed else 'ok'}" if timed[name][2] else ""
        print(f"  {name:<42} {cost_us:6.2f}{bar}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
