"""A slice of `make fuzz`: the corpus that was kept, and a few hundred new inputs for each target."""

from __future__ import annotations

import pytest

from fuzz.fuzzer import Finding, Fuzzer, smaller, tried
from fuzz.targets import TARGETS, Target


@pytest.mark.parametrize("name", TARGETS)
def test_only_documented_errors_are_raised(name: str) -> None:
    fuzzer = Fuzzer(name, seed=1)
    assert list(fuzzer.first()) == []
    assert [item for item in fuzzer.more(400) if isinstance(item, Finding)] == []


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> str:
    """A target that fails on one byte."""

    def run(data: bytes) -> None:
        if b"\xc1" in data:
            raise KeyError("boom")

    monkeypatch.setitem(TARGETS, "fragile", Target(run, (ValueError,), (b"\x94\xa1a\x01\x02",)))
    return "fragile"


def test_an_error_that_is_not_documented_is_found_and_made_small(fragile: str) -> None:
    found = [item for item in Fuzzer(fragile, seed=1).more(3000) if isinstance(item, Finding)]
    assert found
    assert smaller(found[0]).data == b"\xc1"
    assert tried(fragile, b"\x94") is None


def test_inputs_that_reach_new_lines_are_kept() -> None:
    fuzzer = Fuzzer("envelope", seed=1)
    before = len(fuzzer.corpus)
    fuzzer.corpus = [b""]
    list(fuzzer.more(500))
    assert len(fuzzer.corpus) > 3, before
