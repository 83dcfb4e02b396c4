"""`tampu limit`: shows, sets and clears the limits of a queue."""

from __future__ import annotations

import pytest

from cli.lab import invoke
from cli.shop import QUEUE, Filled


def test_limits_are_set_shown_and_cleared(shop: Filled) -> None:
    assert "limited" in invoke("limit", "set", QUEUE, "--concurrency", "200").out
    invoke("limit", "set", QUEUE, "--per-key", "--concurrency", "2", "--rate", "100/m", "--ordered")
    invoke("limit", "set", QUEUE, "--key", "acme", "--concurrency", "unlimited", "--weight", "3")
    invoke("limit", "set", QUEUE, "--task", "charge", "--rate", "10/s", "--burst", "5")
    shown = invoke("limit", "show", QUEUE, "--json").json
    assert shown["queue"] == {"concurrency": 200}
    assert shown["per_key"] == {"concurrency": 2, "rate": "100/m", "ordered": True}
    assert shown["keys"] == {"acme": {"concurrency": None, "weight": 3.0}}
    assert shown["tasks"] == {"charge": {"rate": "10/s", "burst": 5}}
    table = invoke("limit", "show", QUEUE).out
    assert all(text in table for text in ("every key", "key acme", "unlimited", "task charge", "100/m"))
    assert invoke("limit", "clear", QUEUE, "--key", "acme").code == 0
    assert invoke("limit", "show", QUEUE, "--json").json["keys"] == {}
    assert invoke("limit", "clear", QUEUE).code == 0
    assert "has no limits" in invoke("limit", "show", QUEUE).err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ((), "give at least one of"),
        (("--concurrency", "-1"), "whole number or `unlimited`"),
        (("--rate", "0/s"), "rate must be starts per unit of time"),
        (("--weight", "2"), "weight and ordered belong to keys"),
        (("--key", "a", "--task", "b", "--concurrency", "1"), "key or task, not both"),
        (("--key", "a", "--per-key", "--concurrency", "1"), "--per-key is for every key"),
        (("--key", "", "--concurrency", "1"), "key must be text"),
    ],
)
def test_a_limit_that_makes_no_sense_is_a_usage_error(options: tuple[str, ...], complaint: str, shop: Filled) -> None:
    done = invoke("limit", "set", QUEUE, *options)
    assert done.code == 2
    assert complaint in done.complaint


def test_job_why_names_the_limit(shop: Filled) -> None:
    job_id = invoke("add", "limited", "charge", "{}").out.strip()
    invoke("limit", "set", "limited", "--concurrency", "0")
    assert "the queue is at its limit: 0 of 0 jobs run" in invoke("job", "why", job_id).out
