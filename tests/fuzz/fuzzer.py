"""The fuzzer: keeps inputs that reach lines of tampu no other input reached, and reports what is not documented."""

from __future__ import annotations

import random
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuzz.mutate import mutated
from fuzz.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Iterator

CORPUS = Path(__file__).with_name("corpus")
#: Longest time one input may take, in seconds: a decoder's time is linear in its bytes.
MAX_SECS = 2.0


@dataclass(frozen=True)
class Finding:
    """An input on which a target did what it does not document."""

    target: str
    data: bytes
    text: str

    def __str__(self) -> str:
        shown = self.data.hex() if len(self.data) <= 100 else f"{self.data[:50].hex()}... ({len(self.data)} bytes)"
        return f"{self.target} on {shown}: {self.text}"


def kept(name: str) -> list[bytes]:
    """Return the inputs of a target: its seeds, and those that were kept."""
    path = CORPUS / f"{name}.hex"
    lines = path.read_text().splitlines() if path.exists() else []
    return [*TARGETS[name].seeds, *(bytes.fromhex(line) for line in lines)]


def keep(name: str, data: bytes) -> None:
    """Add an input to the corpus."""
    CORPUS.mkdir(exist_ok=True)
    with (CORPUS / f"{name}.hex").open("a") as file:
        file.write(data.hex() + "\n")


def tried(name: str, data: bytes) -> Finding | None:
    """Run a target on one input."""
    target = TARGETS[name]
    began = time.monotonic()
    try:
        target.run(data)
    except target.errors:
        pass
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return Finding(name, data, f"{type(error).__name__}: {str(error)[:200]} at {last.filename}:{last.lineno}")
    took = time.monotonic() - began
    return Finding(name, data, f"took {took:.1f} s") if took > MAX_SECS else None


@dataclass
class Fuzzer:
    """Fuzzes one target."""

    name: str
    seed: int
    runs: int = 0
    corpus: list[bytes] = field(default_factory=list)
    _lines: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._random = random.Random(f"{self.seed} {self.name}")
        self.corpus = kept(self.name)

    def first(self) -> Iterator[Finding]:
        """Run the corpus."""
        for data in list(self.corpus):
            finding, _ = self._traced(data)
            if finding:
                yield finding

    def more(self, count: int) -> Iterator[Finding | bytes]:
        """Run so many new inputs; yield findings, and inputs that reached something new."""
        for _ in range(count):
            data = mutated(self._random, self.corpus)
            finding, is_new = self._traced(data)
            if finding:
                yield finding
            elif is_new:
                self.corpus.append(data)
                yield data

    def _traced(self, data: bytes) -> tuple[Finding | None, bool]:
        self.runs += 1
        before = len(self._lines)
        lines = self._lines

        def trace_line(frame: Any, event: str, _: Any) -> Any:
            if event == "line":
                lines.add((frame.f_code.co_filename, frame.f_lineno))
            return trace_line

        def trace_call(frame: Any, event: str, _: Any) -> Any:
            return trace_line if "/tampu/" in frame.f_code.co_filename else None

        earlier = sys.gettrace()
        sys.settrace(trace_call)
        try:
            finding = tried(self.name, data)
        finally:
            sys.settrace(earlier)
        return finding, len(lines) > before


def smaller(finding: Finding) -> Finding:
    """Return the same finding on fewer bytes: pieces are left out as long as the error stays the same."""
    kind = finding.text.partition(":")[0]
    step = max(len(finding.data) // 2, 1)
    while step:
        at = 0
        while at < len(finding.data):
            shorter = tried(finding.target, finding.data[:at] + finding.data[at + step :])
            if shorter is not None and shorter.text.partition(":")[0] == kind:
                finding = shorter
            else:
                at += step
        step //= 2
    return finding
