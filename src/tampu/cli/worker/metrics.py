"""Metrics of several processes as one page: each sample gets a label with the number of its process."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?(?P<value> .*)")


def merge(texts: Mapping[int, str]) -> str:
    """One page from the pages of processes, by their numbers; families stay together, as the format demands."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for number, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head:
                    head.append(line)
            elif found := _SAMPLE.fullmatch(line):
                labels = ",".join(filter(None, [f'process="{number}"', found["labels"]]))
                samples.setdefault(family, []).append(f"{found['name']}{{{labels}}}{found['value']}")
    lines: list[str] = []
    for family, found_samples in samples.items():
        lines += heads.get(family, [])
        lines += found_samples
    return "\n".join(lines) + "\n"
