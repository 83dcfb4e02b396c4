"""The soak's comparisons: what counts as growth. The soak itself takes minutes: `make soak`."""

from __future__ import annotations

import pytest

from chaos.run import KEYS
from chaos.soak import Rest, compared, left_over

KEPT = {KEYS.stream: 860, KEYS.events: 118_000, KEYS.dlq: 4_500}
FIRST = Rest(KEPT, letters=10, used_memory=2_200_000, marks=5, lasting_marks=0)


def grown(last: Rest) -> list[str]:
    return [growth.what for growth in compared(FIRST, last) if growth.is_too_much]


def rest(letters: int = 10, other: int = 2_076_640, marks: int = 5, lasting_marks: int = 0, **sizes: int) -> Rest:
    kept = KEPT | {f"{KEYS.tag}:{key}": size for key, size in sizes.items()}
    return Rest(kept, letters, other + sum(kept.values()), marks, lasting_marks)


def test_a_run_that_leaves_what_its_first_part_left_has_not_grown() -> None:
    assert grown(rest()) == []
    assert list(left_over([FIRST, rest()], cancels=10)) == []


def test_dead_letters_may_become_more_but_not_larger() -> None:
    assert grown(rest(letters=1000, dlq=450_000)) == []
    assert grown(rest(letters=1000, dlq=600_000)) == [f"{KEYS.dlq}: bytes per entry"]


@pytest.mark.parametrize("key", ["stream", "events"])
def test_any_other_key_that_becomes_larger_is_found(key: str) -> None:
    assert grown(rest(**{key: 200_000})) == [f"{KEYS.tag}:{key}: bytes at rest"]


def test_memory_of_the_server_beside_its_keys_is_found() -> None:
    assert grown(rest(other=2_400_000)) == ["server without its keys: kB at rest"]


def test_a_key_that_no_earlier_part_has_left_is_found() -> None:
    result = f"{KEYS.tag}:result:1"
    last = rest(**{"promoter:lock": 104, "result:1": 88})
    assert list(left_over([FIRST, rest(**{"promoter:lock": 104}), last], cancels=15)) == [
        f"a key that is left over: {result}"
    ]


def test_marks_beyond_the_cancels_and_marks_without_a_ttl_are_found() -> None:
    assert list(left_over([FIRST, rest()], cancels=9)) == ["10 marks of cancelled jobs, after 9 cancels"]
    assert list(left_over([FIRST, rest(lasting_marks=2)], cancels=10)) == [
        "2 marks of cancelled jobs without a TTL of at most a day"
    ]
