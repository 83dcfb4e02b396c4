"""The checker on short histories: which ones it must accept, and what each rule must find."""

from __future__ import annotations

import pytest

from chaos.checker import check, story
from chaos.hits import count_hits
from chaos.records import History


def history(**files: str) -> History:
    """Return a history from the records of several processes, with times in seconds."""
    made = History(lease_secs=4.0)
    for process, text in files.items():
        lines = [line.strip() for line in text.split(";") if line.strip()]
        made.add_file(process, [f"{_ns(line)}\n" for line in lines])
    for runs in made.runs.values():
        runs.sort(key=lambda run: run.start)
    return made


def _ns(line: str) -> str:
    at, kind, *words = line.split()
    if kind == "fault":
        words[2:] = [str(float(word) * 1e9) for word in words[2:]]
    return " ".join([str(float(at) * 1e9), kind, *words])


ADDED = "1 ask 3 ok - a; 2 ok a"
ONCE = "3 start a 0; 4 end a 0 ok"
AGAIN = "9 start a 0; 9 end a 0 ok"
FIRED = "1 start s@1000 0; 1 end s@1000 0 ok"

SOUND: dict[str, dict[str, str]] = {
    "one run": {"p": ADDED, "w": ONCE},
    "a retry of each of two runs after a failover": {
        "p": ADDED,
        "w": "3 start a 0; 5 end a 0 fail; 6 start a 1; 6 end a 1 ok",
        "v": "4 start a 0; 7 end a 0 fail; 8 start a 1; 8 end a 1 ok",
        "injector": "9 fault failover * 2 9",
    },
    "a retry": {"p": ADDED, "w": "3 start a 0; 4 end a 0 fail; 5 start a 1; 6 end a 1 ok"},
    "not confirmed and never run": {"p": "1 ask 3 ok - a; 2 unknown a"},
    "not confirmed and run": {"p": "1 ask 3 ok - a; 2 unknown a", "w": ONCE},
    "a producer that died before it knew": {"p": "1 ask 3 ok - a", "w": ONCE, "injector": "1.5 death p"},
    "run again after a death": {"p": ADDED, "w": "3 start a 0", "v": AGAIN, "injector": "4 death w"},
    "done, but the worker died before it could say so": {
        "p": ADDED,
        "w": ONCE,
        "v": AGAIN,
        "injector": "4.5 death w",
    },
    "done while the server was away, and the worker died then": {
        "p": ADDED,
        "w": ONCE,
        "v": "30 start a 0; 30 end a 0 ok",
        "injector": "20 fault server-kill * 3.5 20; 21 death w",
    },
    "leases evicted while the server was busy for longer than one": {
        "p": ADDED,
        "w": ONCE,
        "v": AGAIN,
        "injector": "8 fault busy * 3.5 8; 8.5 fault evict * 3.6 8.5",
    },
    "deployed while the server was away": {
        "p": ADDED,
        "w": ONCE,
        "v": "30 start a 0; 30 end a 0 ok",
        "injector": "20 fault server-kill * 3.5 20; 10 fault term w 3 10",
    },
    "run again after a stop": {
        "p": ADDED,
        "w": "3 start a 0; 12 end a 0 ok",
        "v": "8 start a 0; 9 end a 0 ok",
        "injector": "11 fault stop w 3.5 11",
    },
    "a worker that was kept from running for half a lease": {
        "p": ADDED,
        "w": "3 start a 0; 8 stalled 4000; 8 end a 0 ok",
        "v": "7.5 start a 0; 7.6 end a 0 ok",
    },
    "stopped between the look at the lease and the start": {
        "p": ADDED,
        "w": "11.05 start a 0; 12 end a 0 ok",
        "v": "8 start a 0; 9 end a 0 ok",
        "injector": "11 fault stop w 3.5 11",
    },
    "started in the moment in which it was resumed": {
        "p": ADDED,
        "w": "10.99 start a 0; 12 end a 0 ok",
        "v": "8 start a 0; 9 end a 0 ok",
        "injector": "11 fault stop w 3.5 11",
    },
    "fetched before a failover and started right after it": {
        "p": ADDED,
        "w": "5 start a 0; 5 end a 0 ok; 6 start a 0; 6 end a 0 ok",
        "injector": "4 fault failover * 2.5 4",
    },
    "the same, and the new owner was later": {
        "p": ADDED,
        "w": "11.05 start a 0; 12 end a 0 ok",
        "v": "11.5 start a 0; 11.6 end a 0 ok",
        "injector": "11 fault stop w 3.5 11",
    },
    "acknowledged on a master that is no more": {
        "p": ADDED,
        "w": ONCE,
        "v": "12 start a 0; 12 end a 0 ok",
        "injector": "7 fault failover * 5 7",
    },
    "succeeded after the last write that the new master has": {
        "p": "1 ask 1 ok - a; 2 ok a",
        "w": ONCE,
        "injector": "8 death w; 9 fault failover * 5.9 9; 20 dead a retries_exhausted 1 WorkerLost",
    },
    "an ID added again after its first add was lost with the master": {
        "p": "1 ask 3 ok u a; 2 unknown a",
        "q": "8 ask 3 ok u b; 8 ok b",
        "w": f"{ONCE}; 9 start b 0; 9 end b 0 ok",
        "injector": "7 fault failover * 2 7",
    },
    "not confirmed, begun and lost with its master": {
        "p": "1 ask 3 ok - a; 2 unknown a",
        "w": "3 start a 0; 4 end a 0 fail",
        "injector": "7 fault failover * 2 7",
    },
    "all attempts failed": {
        "p": "1 ask 2 never - a; 2 ok a",
        "w": "3 start a 0; 4 end a 0 fail; 5 start a 1; 6 end a 1 fail",
        "run": "9 dead a retries_exhausted 2 OnPurposeError",
    },
    "its last attempt had begun": {
        "p": "1 ask 1 ok - a; 2 ok a",
        "w": "3 start a 0",
        "injector": "4 death w; 9 dead a retries_exhausted 1 WorkerLost",
    },
    "killed in the moment between the mark and the first line": {
        "p": "1 ask 1 ok - a; 2 ok a",
        "injector": "4 death w; 9 dead a retries_exhausted 1 WorkerLost",
    },
    "it killed more workers, and its deaths were not replicated": {
        "p": "1 ask 1 die - a; 2 ok a",
        "w": "3 start a 0",
        "v": "9 start a 0",
        "injector": "4 death w; 8 fault failover * 3.5 8; 10 death v; 20 dead a retries_exhausted 1 WorkerLost",
    },
    "it killed three workers, and waited in three that others killed": {
        "p": "1 ask 3 die - a; 2 ok a",
        "w": "3 start a 0", "v": "9 start a 0", "u": "15 start a 0",
        "injector": "4 death w; 10 death v; 12 death x; 13 death y; 14 death z; 16 death u; "
        "20 dead a retries_exhausted 6 WorkerLost",
    },
    "given up": {
        "p": "1 ask 3 give-up - a; 2 ok a",
        "w": "3 start a 0; 4 end a 0 fail",
        "run": "9 dead a unrecoverable 1 UnrecoverableError",
    },
    "the same id twice": {"p": "1 ask 3 ok u a; 2 ok a", "q": "1 ask 3 ok u b; 2 known b", "w": ONCE},
    "a schedule": {"run": "9 schedule s 500 1000 2000", "w": f"{FIRED}; 2 start s@1500 0; 2 end s@1500 0 ok"},
    "a stored result": {"p": "1 ask 3 result - a; 2 ok a", "w": ONCE, "run": "9 result a a"},
    "cancelled before it ran": {"p": "1 ask 3 ok - a; 2 ok a; 3 cancel a; 3 cancelled a"},
    "cancelled while it ran": {
        "p": "1 ask 3 ok - a; 2 ok a; 3 cancel a; 3 requested a", "w": "2 start a 0; 4 end a 0 fail"
    },
    "run just before its worker learnt of the cancel": {
        "p": "1 ask 3 ok - a; 2 ok a; 3 cancel a; 3 requested a", "w": "4 start a 0; 5 end a 0 ok"
    },
    "run by a worker that could not learn of the cancel": {
        "p": "1 ask 3 ok - a; 2 ok a; 3 cancel a; 3 requested a",
        "w": "9 start a 0; 10 end a 0 ok",
        "injector": "9 fault blackhole w 2 8",
    },
    "cancelled, and the cancel was not replicated": {
        "p": "1 ask 3 ok - a; 2 ok a; 3 cancel a; 3 cancelled a",
        "w": "9 start a 0; 10 end a 0 ok",
        "injector": "8 fault failover * 2.5 8",
    },
}  # fmt: skip

BROKEN: dict[str, tuple[str, dict[str, str]]] = {
    "never ran": ("missing", {"p": ADDED}),
    "still there": ("missing", {"p": ADDED, "run": "9 left a stream"}),
    "failed and gone": ("unfinished", {"p": ADDED, "w": "3 start a 0; 4 end a 0 fail"}),
    "cut short and gone": ("unfinished", {"p": ADDED, "w": "3 start a 0", "injector": "4 death w"}),
    "begun and never ended": ("unfinished", {"p": ADDED, "w": "3 start a 0", "v": AGAIN}),
    "confirmed, begun and lost with its master": (
        "unfinished",
        {"p": ADDED, "w": "3 start a 0; 4 end a 0 fail", "injector": "7 fault failover * 2 7"},
    ),
    "run twice": ("rerun", {"p": ADDED, "w": ONCE, "v": AGAIN}),
    "run twice at once": ("rerun", {"p": ADDED, "w": "3 start a 0; 9 end a 0 ok", "v": "4 start a 0; 5 end a 0 ok"}),
    "run twice by the same worker at once": (
        "rerun",
        {"p": ADDED, "w": "3 start a 0; 4 start a 0; 8 end a 0 ok; 9 end a 0 ok"},
    ),
    "run again although the worker was stopped after the outage": (
        "rerun",
        {"p": ADDED, "w": ONCE, "v": "30 start a 0; 30 end a 0 ok",
         "injector": "5 fault server-kill * 3.5 5; 10 fault term w 3 10"},
    ),
    "run twice although only leases were evicted": (
        "rerun",
        {"p": ADDED, "w": ONCE, "v": AGAIN, "injector": "8.5 fault evict * 3.6 8.5"},
    ),
    "run twice although the server was not busy for a lease": (
        "rerun",
        {"p": ADDED, "w": ONCE, "v": AGAIN, "injector": "7 fault busy * 3.5 7; 8.5 fault evict * 3.6 8.5"},
    ),
    "run twice long after a failover": (
        "rerun",
        {"p": ADDED, "w": "9 start a 0; 9 end a 0 ok; 10 start a 0; 10 end a 0 ok",
         "injector": "4 fault failover * 2.5 4"},
    ),
    "run again although its success was replicated before the failover": (
        "rerun",
        {"p": ADDED, "w": ONCE, "v": "12 start a 0; 12 end a 0 ok", "injector": "9 fault failover * 6.1 9"},
    ),
    "dead-lettered although its success was replicated before the failover": (
        "dead",
        {"p": "1 ask 1 ok - a; 2 ok a", "w": ONCE,
         "injector": "8 death w; 9 fault failover * 6.1 9; 20 dead a retries_exhausted 1 WorkerLost"},
    ),
    "not confirmed, but replicated and gone": (
        "unfinished",
        {"p": "1 ask 3 ok - a; 2 unknown a", "w": "3 start a 0; 4 end a 0 fail",
         "injector": "7 fault failover * 3.1 7"},
    ),
    "an ID added again although its first add was replicated": (
        "unique",
        {"p": "1 ask 3 ok u a; 2 unknown a", "q": "8 ask 3 ok u b; 8 ok b",
         "w": f"{ONCE}; 9 start b 0; 9 end b 0 ok", "injector": "7 fault failover * 3.1 7"},
    ),
    "run although its cancellation was replicated before the failover": (
        "cancelled",
        {"p": "1 ask 3 ok - a; 2 ok a; 3 cancel a; 3 cancelled a", "w": "9 start a 0; 10 end a 0 ok",
         "injector": "8 fault failover * 3.1 8"},
    ),
    "run twice after a stop, and neither was the one stopped": (
        "rerun",
        {"p": ADDED, "w": "8 start a 0; 8 end a 0 ok", "v": AGAIN, "injector": "11 fault stop u 3.5 11"},
    ),
    "run again because the server was away": (
        "rerun",
        {"p": ADDED, "w": "3 start a 0; 20 end a 0 ok", "v": "14 start a 0; 15 end a 0 ok",
         "injector": "12 fault server-stop * 4 12"},
    ),
    "run again long after it was done, when its worker died": (
        "rerun",
        {"p": ADDED, "w": ONCE, "v": "60 start a 0; 60 end a 0 ok", "injector": "50 death w"},
    ),
    "the wrong worker died": (
        "rerun",
        {"p": ADDED, "w": ONCE, "v": AGAIN, "injector": "4 death v"},
    ),
    "many starts right after a stop": (
        "rerun",
        {"p": "1 ask 3 ok - a b; 2 ok a b",
         "v": "8 start a 0; 8 end a 0 ok; 8 start b 0; 8 end b 0 ok",
         "w": "11.01 start a 0; 12 end a 0 ok; 11.02 start b 0; 12 end b 0 ok",
         "injector": "11 fault stop w 3.5 11"},
    ),
    "a death used up an attempt": (
        "attempts",
        {"p": ADDED, "w": "3 start a 0", "v": "9 start a 1; 9 end a 1 ok", "injector": "4 death w"},
    ),
    "retried while it still ran": (
        "attempts",
        {"p": ADDED, "w": "3 start a 0; 9 end a 0 fail", "v": "5 start a 1; 6 end a 1 ok"},
    ),
    "more attempts than it has": (
        "attempts",
        {"p": "1 ask 1 ok - a; 2 ok a", "w": "3 start a 0; 4 end a 0 fail; 5 start a 1; 6 end a 1 ok"},
    ),
    "it killed more workers than promised": (
        "attempts",
        {"p": "1 ask 1 die - a; 2 ok a", "w": "3 start a 0", "v": "9 start a 0",
         "injector": "4 death w; 10 death v; 20 dead a retries_exhausted 1 WorkerLost"},
    ),
    "it killed more workers than promised, and one was stopped in between": (
        "attempts",
        {"p": "1 ask 1 die - a; 2 ok a", "w": "3 start a 0", "v": "9 start a 0",
         "injector": "4 death w; 8 fault term u 5 8; 10 death v; 20 dead a retries_exhausted 1 WorkerLost"},
    ),
    "dead-lettered and never started": (
        "dead",
        {"p": ADDED, "injector": "4 death w; 9 dead a retries_exhausted 1 WorkerLost"},
    ),
    "more than one per death": (
        "dead",
        {"p": "1 ask 1 ok - a b; 2 ok a b",
         "injector": "4 death w; 9 dead a retries_exhausted 1 WorkerLost; 9 dead b retries_exhausted 1 WorkerLost"},
    ),
    "dead-lettered with attempts left": (
        "dead",
        {"p": ADDED, "w": "3 start a 0; 4 end a 0 fail", "run": "9 dead a retries_exhausted 1 OnPurposeError"},
    ),
    "dead-lettered after one death": (
        "dead",
        {"p": ADDED, "w": "3 start a 0", "injector": "4 death w; 9 dead a retries_exhausted 1 WorkerLost"},
    ),
    "dead-lettered after it killed three workers, and others died before it started": (
        "dead",
        {"p": "1 ask 3 die - a; 2 ok a", "w": "3 start a 0", "v": "9 start a 0", "u": "15 start a 0",
         "injector": "1 death x; 1 death y; 2 death z; 4 death w; 10 death v; 16 death u; "
         "20 dead a retries_exhausted 6 WorkerLost"},
    ),
    "dead-lettered after three deaths that it did not cause": (
        "dead",
        {"p": "1 ask 3 ok - a; 2 ok a", "w": "3 start a 0", "v": "9 start a 0", "u": "15 start a 0",
         "injector": "4 death w; 10 death v; 16 death u; 20 dead a retries_exhausted 6 WorkerLost"},
    ),
    "dead-lettered although it succeeded": (
        "dead",
        {"p": "1 ask 1 ok - a; 2 ok a", "w": ONCE, "run": "9 dead a retries_exhausted 1 WorkerLost"},
    ),
    "dead-lettered twice": (
        "dead",
        {"p": "1 ask 1 never - a; 2 ok a", "w": "3 start a 0; 4 end a 0 fail",
         "run": "9 dead a retries_exhausted 1 E; 9 dead a retries_exhausted 1 E"},
    ),
    "a letter that counts wrongly": (
        "dead",
        {"p": "1 ask 1 never - a; 2 ok a", "w": "3 start a 0; 4 end a 0 fail", "run": "9 dead a retries_exhausted 4 E"},
    ),
    "an entry that could not be read": ("dead", {"p": ADDED, "w": ONCE, "run": "9 dead a malformed 0 -"}),
    "unrecoverable, which nobody said": (
        "dead",
        {"p": ADDED, "w": "3 start a 0; 4 end a 0 fail", "run": "9 dead a unrecoverable 1 E"},
    ),
    "it ended where it had not begun": ("invented", {"p": ADDED, "w": ONCE, "v": "5 end a 0 ok"}),
    "nobody asked for it": ("invented", {"w": ONCE}),
    "refused and run": ("invented", {"p": "1 ask 3 ok - a; 2 refused a", "w": ONCE}),
    "a due time without a fire": (
        "schedule",
        {"run": "9 schedule s 500 1000 2000", "w": FIRED},
    ),
    "a fire that was not due": (
        "schedule",
        {"run": "9 schedule s 500 1000 1500", "w": f"{FIRED}; 2 start s@1250 0; 2 end s@1250 0 ok"},
    ),
    "a fire that ran twice": (
        "rerun",
        {"run": "9 schedule s 500 1000 1500", "w": f"{FIRED}; 2 start s@1000 0; 2 end s@1000 0 ok"},
    ),
    "one id added twice": (
        "unique",
        {"p": "1 ask 3 ok u a; 2 ok a", "q": "1 ask 3 ok u b; 2 ok b", "w": ONCE, "v": "3 start b 0; 4 end b 0 ok"},
    ),
    "an id that is known and never ran": ("unique", {"p": "1 ask 3 ok u a; 2 known a"}),
    "a result that is not there": ("result", {"p": "1 ask 3 result - a; 2 ok a", "w": ONCE}),
    "the result of another job": ("result", {"p": "1 ask 3 result - a; 2 ok a", "w": ONCE, "run": "9 result a b"}),
    "run after its cancellation": ("cancelled", {"p": "1 ask 3 ok - a; 2 ok a; 2.5 cancelled a", "w": ONCE}),
    "run long after its cancel was requested": (
        "cancelled",
        {"p": "1 ask 3 ok - a; 2 ok a; 3 cancel a; 3 requested a", "w": "9 start a 0; 10 end a 0 ok"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("files", SOUND.values(), ids=SOUND.keys())
def test_a_sound_history_has_no_violation(files: dict[str, str]) -> None:
    assert check(history(**files)) == []


@pytest.mark.parametrize(("rule", "files"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_promise_is_found(rule: str, files: dict[str, str]) -> None:
    assert rule in {violation.rule for violation in check(history(**files))}


def test_every_rule_has_a_history_that_breaks_it() -> None:
    rules = "missing unfinished rerun attempts dead invented schedule unique result cancelled".split()
    assert {rule for rule, _ in BROKEN.values()} == set(rules)


def test_a_record_that_a_kill_cut_short_does_not_count() -> None:
    made = History()
    made.add_file("w", ["1 start a 0\n", "2 end a 0 o"])
    assert made.runs["a"][0].outcome == ""


def test_a_fault_counts_as_a_hit_when_a_job_was_in_flight_at_its_target() -> None:
    made = history(
        p=ADDED,
        w="3 start a 0; 5 end a 0 ok",
        injector="9 fault stop w 4 9; 9 fault stop w 6 9; 9 fault stop v 4 9; 9 fault busy * 2.5 3.5",
    )
    hits = count_hits(made)
    assert (hits["stop"].injected, hits["stop"].hit, hits["stop"].jobs) == (3, 1, 1)
    assert (hits["busy"].hit, hits["busy"].jobs) == (1, 1)


def test_a_story_lists_what_happened_to_a_job_in_order() -> None:
    lines = story(history(p=ADDED, w="3 start a 0", v=AGAIN, injector="4 death w"), "a")
    words = [line.split(maxsplit=1)[1] for line in lines]
    assert words.index("w starts attempt 0") < words.index("w is dead") < words.index("v starts attempt 0")
