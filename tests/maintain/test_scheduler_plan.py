"""The plan of fires by policy and lateness: a table, fires recorded from ChasquiMQ, and properties."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tampu import MissedFiresPolicy, RepeatPattern
from tampu.maintain.scheduler import MAX_CATCHUP, MAX_COUNTED, Firing, fire_id, plan
from tampu.wire.repeat import StoredSpec
from tampu.wire.retry import unchecked
from tampu.wire.ulid import decode_ulid_time

SKIP = MissedFiresPolicy.skip()
ONCE = MissedFiresPolicy.fire_once()
ALL_3 = MissedFiresPolicy.fire_all(3)
ALL_50 = MissedFiresPolicy.fire_all(50)
#: A value that another implementation may have stored; tampu's constructor refuses it.
ALL_0 = unchecked(MissedFiresPolicy, "fire-all", 0)

MINUTE = 60_000
HOUR = 60 * MINUTE
DAY = 24 * HOUR
#: 2026-11-15 00:00:00 UTC, a Sunday.
T = 1_794_700_800_000


def spec_of(pattern: RepeatPattern, policy: MissedFiresPolicy = SKIP, **bounds: Any) -> StoredSpec:
    return StoredSpec(key="k", job_name="n", pattern=pattern, payload_slot=b"\xc0", missed_fires=policy, **bounds)


def every(interval_ms: int, policy: MissedFiresPolicy = SKIP, **bounds: Any) -> StoredSpec:
    return spec_of(RepeatPattern.every(interval_ms), policy, **bounds)


def cron(expression: str, policy: MissedFiresPolicy = SKIP, tz: str | None = None, **bounds: Any) -> StoredSpec:
    return spec_of(RepeatPattern.cron(expression, tz=tz), policy, **bounds)


#: Description, spec, lateness, fires and next fire. Times are relative to T, when the spec is due.
TABLE: list[tuple[str, StoredSpec, int, list[int], int | None]] = [
    # on time: all policies are the same
    ("due this very millisecond", every(1000), 0, [0], 1000),
    ("less than one interval late: Skip", every(MINUTE), 59_999, [0], MINUTE),
    ("less than one interval late: FireOnce", every(MINUTE, ONCE), 59_999, [0], MINUTE),
    ("less than one interval late: FireAll", every(MINUTE, ALL_3), 59_999, [0], MINUTE),
    ("on time although FireAll catches up on nothing", every(MINUTE, ALL_0), 59_999, [0], MINUTE),
    # Skip: the newest if less than one interval or less than 10 s late, never an older one
    ("Skip drops the older ones", every(1000), 10_500, [10_000], 11_000),
    ("Skip exactly one interval late: the new one is due", every(MINUTE), MINUTE, [MINUTE], 2 * MINUTE),
    ("Skip far behind still fires the newest", every(300), DAY, [DAY], DAY + 300),
    ("Skip with an interval shorter than any tick", every(1), 777, [777], 778),
    ("Skip, a daily job 8 hours late", cron("0 0 * * *"), 8 * HOUR, [0], DAY),
    ("Skip, a daily job 2 days and 8 hours late", cron("0 0 * * *"), 2 * DAY + 8 * HOUR, [2 * DAY], 3 * DAY),
    ("Skip, a burst: only the newest of it", cron("0-9 0 0 * * *"), 9 * HOUR, [9000], DAY),
    # FireOnce: one fire for all missed ones
    ("FireOnce", every(1000, ONCE), 10_500, [10_000], 11_000),
    ("FireOnce, far behind", cron("*/5 * * * *", ONCE), 30 * DAY + MINUTE, [30 * DAY], 30 * DAY + 5 * MINUTE),
    # FireAll: up to max_catchup fires, the oldest first, then the usual interval
    ("FireAll takes the oldest", every(1000, ALL_3), 10_500, [0, 1000, 2000], 11_000),
    ("FireAll takes all there are", every(1000, ALL_50), 4500, [0, 1000, 2000, 3000, 4000], 5000),
    ("FireAll with nothing to catch up on", every(1000, ALL_0), 10_500, [], 11_000),
    ("FireAll by the clock", cron("0 */6 * * *", ALL_3), DAY, [0, 6 * HOUR, 12 * HOUR], DAY + 6 * HOUR),
    # end_before: a fire at exactly that time is allowed, none after it
    ("the last one before the end", every(1000, end_before_ms=T + 999), 0, [0], None),
    ("one more fits exactly", every(1000, end_before_ms=T + 1000), 0, [0], 1000),
    ("the end has passed: Skip", every(1000, end_before_ms=T + 5000), 5900, [5000], None),
    ("the end has passed, within the grace of 10 s", every(1000, end_before_ms=T + 5000), 14_999, [5000], None),
    ("the end has passed, and Skip is too late", every(1000, end_before_ms=T + 5000), 15_000, [], None),
    ("the end has passed: FireOnce", every(1000, ONCE, end_before_ms=T + 5000), MINUTE, [5000], None),
    ("the end has passed: FireAll", every(1000, ALL_50, end_before_ms=T + 2500), MINUTE, [0, 1000, 2000], None),
    ("due after the end", every(1000, end_before_ms=T - 1), 0, [], None),
    # the last fire is never lost
    ("the only fire of a year, on time", cron("0 0 0 15 11 * 2026"), 5, [0], None),
    ("the only fire of a year, a month late", cron("0 0 0 15 11 * 2026"), 30 * DAY, [0], None),
    ("the last of several, FireAll", cron("0 0 0 15,16 11 * 2026", ALL_50), 9 * DAY, [0, DAY], None),
]


@pytest.mark.parametrize(("spec", "late_ms", "fires", "next_ms"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE])
def test_a_plan_is(spec: StoredSpec, late_ms: int, fires: list[int], next_ms: int | None) -> None:
    expected = Firing(tuple(T + fire for fire in fires), None if next_ms is None else T + next_ms)
    assert plan(spec, T, T + late_ms) == expected


@pytest.mark.parametrize(
    ("spec", "late_ms", "skipped"),
    [
        (every(1000), 0, 0),
        (every(1000), 5500, 5),
        (every(1000, ALL_3), 10_500, 8),
        (every(1000, ONCE), 10_500, 0),
        (cron("0 0 * * *"), 2 * DAY + 8 * HOUR, 2),
        (cron("* * * * * *"), 365 * DAY, MAX_COUNTED - 1),
    ],
)
def test_a_plan_counts_the_fires_it_drops(spec: StoredSpec, late_ms: int, skipped: int) -> None:
    assert plan(spec, T, T + late_ms).skipped == skipped


@pytest.mark.parametrize(
    ("spec", "since", "late_ms", "fires"),
    [
        (every(1000), 0, 3500, [0, 1000, 2000, 3000]),
        (every(1000, ALL_3), 0, 4500, [0, 1000, 2000, 3000, 4000]),
        (every(1000, ONCE), 0, 3500, [3000]),
        (every(1000), 1500, 3500, [2000, 3000]),
        (every(1000), 2000, 3500, [2000, 3000]),
        (every(1000, ALL_3), 5000, 6500, [0, 1000, 2000, 5000, 6000]),
        (every(MINUTE), 5000, 6500, [0]),
        (cron("* * * * * *"), 1500, 3500, [2000, 3000]),
        (cron("0 0 * * *"), 2 * DAY - HOUR, 2 * DAY, [2 * DAY]),
        (every(1000, end_before_ms=T + 2500), 0, 3500, [0, 1000, 2000]),
    ],
)
def test_fires_of_a_takeover_are_all_written(spec: StoredSpec, since: int, late_ms: int, fires: list[int]) -> None:
    assert plan(spec, T, T + late_ms, T + since).fires == tuple(T + fire for fire in fires)


def at(zone: str, *when: int) -> int:
    return int(datetime(*when, tzinfo=ZoneInfo(zone)).timestamp()) * 1000  # type: ignore[arg-type, misc]


def test_a_zone_keeps_its_time_of_day_when_the_clocks_change() -> None:
    spec = cron("0 9 * * *", ALL_50, tz="America/New_York")
    due, now = at("America/New_York", 2026, 10, 31, 9), at("America/New_York", 2026, 11, 2, 10)
    # Clocks go back on 1 November: a day of 25 hours.
    assert plan(spec, due, now) == Firing(
        (due, due + 25 * HOUR, due + 49 * HOUR), at("America/New_York", 2026, 11, 3, 9)
    )


def test_a_spec_far_behind_is_planned_at_once() -> None:
    """One fire per second for 30 years is a billion fires, which must not be counted one by one."""
    for spec in (cron("* * * * * *"), cron("* * * * * *", ONCE, tz="America/Lima"), every(1)):
        firing = plan(spec, T - 30 * 365 * DAY, T)
        assert firing.fires == (T,)
    firing = plan(cron("* * * * * *", MissedFiresPolicy.fire_all(2**32 - 1)), T - 365 * DAY, T)
    assert len(firing.fires) == MAX_CATCHUP
    assert firing.next_ms == T + 1000


policies = st.sampled_from([SKIP, ONCE, ALL_3, ALL_50])
patterns = st.one_of(
    st.integers(1, 10 * DAY).map(RepeatPattern.every),
    st.sampled_from(["* * * * * *", "*/7 * * * *", "30 2 * * *", "0 0 1 * *", "0 0 0 1 1 * 2026,2027"]).flatmap(
        lambda text: st.sampled_from([None, "America/New_York", "Asia/Kolkata"]).map(
            lambda tz: RepeatPattern.cron(text, tz=tz)
        )
    ),
)


@given(patterns, policies, st.integers(0, 3 * DAY), st.one_of(st.none(), st.integers(0, 4 * DAY)))
def test_in_every_plan_the_fires_are_due_and_the_next_one_is_not(
    pattern: RepeatPattern, policy: MissedFiresPolicy, late_ms: int, end_after_ms: int | None
) -> None:
    due = pattern.next_fire_ms(T)
    if due is None:
        return
    now = due + late_ms
    end = None if end_after_ms is None else due + end_after_ms
    firing = plan(spec_of(pattern, policy, end_before_ms=end), due, now)
    last = now if end is None else min(now, end)
    assert list(firing.fires) == sorted(set(firing.fires))
    assert all(due <= fire <= last for fire in firing.fires)
    assert firing.next_ms is None or firing.next_ms > now
    assert firing.next_ms is None or end is None or firing.next_ms <= end
    # Each fire, and the next one, matches the pattern.
    assert all(
        fire == due or pattern.next_fire_ms(fire - 1) == fire or pattern.kind == "every" for fire in firing.fires
    )
    if policy in (ALL_3, ALL_50):
        assert len(firing.fires) >= 1
    else:
        assert len(firing.fires) <= 1


def test_the_id_of_a_fire_is_the_same_everywhere() -> None:
    # Computed independently: the millisecond, then the first 80 bits of SHA-256("mail::every:1000"), in base 32.
    assert fire_id("mail::every:1000", T) == "01M7E81W006NXBQHD8QPCS5R5F"
    assert decode_ulid_time(fire_id("mail::every:1000", T)) == T
    assert len({fire_id(key, T + late) for key in ("a", "b", "é", "\udcff") for late in (0, 1)}) == 8


# --- fires recorded from ChasquiMQ 1.3.0

RECORDED = json.loads((Path(__file__).parents[1] / "vectors" / "cmq_fires.json").read_text())
#: Differences from ChasquiMQ, and their reasons.
DIFFERENT = {
    "missed_skip": "it fires nothing once a whole interval has passed; Skip here fires the newest due time",
    "bug_every_shorter_than_tick": "for the same reason a spec with an interval shorter than a tick never fires there",
    "missed_fire_once": "its one fire is dated as the oldest missed one, ours as the newest",
}


def recorded_rounds() -> list[Any]:
    rounds = []
    for vector in RECORDED:
        for number, one in enumerate(vector["rounds"]):
            rounds.append(pytest.param(vector, one, id=f"{vector['name']}-{number}"))
    return rounds


@pytest.mark.parametrize(("vector", "one"), recorded_rounds())
def test_a_plan_matches_the_recorded_one_except_listed_differences(vector: dict[str, Any], one: dict[str, Any]) -> None:
    policy = {"Skip": SKIP, "FireOnce": ONCE}.get(str(vector["missed_fires"]))
    if policy is None:
        policy = MissedFiresPolicy.fire_all(vector["missed_fires"]["FireAll"])
    end = vector["end_before_ms"] or None
    firing = plan(every(vector["every_ms"], policy, end_before_ms=end), one["due_ms"], one["now_ms"])
    is_over = end is not None and one["next_ms"] > end  # there, the script removes it given the next fire
    assert firing.next_ms == (None if is_over else one["next_ms"])
    if vector["name"] in DIFFERENT:
        assert firing.fires == (one["next_ms"] - vector["every_ms"],)
        assert len(one["fires"]) <= 1
    else:
        assert list(firing.fires) == one["fires"]


def test_every_listed_difference_still_exists() -> None:
    assert set(DIFFERENT) <= {vector["name"] for vector in RECORDED}
