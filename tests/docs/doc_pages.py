"""Run the code of a page of docs/, so that every example works when it is copied.

| block | what happens |
|---|---|
| `python` that starts with `# name.py` | saved under that name in the page's folder |
| any other `python` | run, with top-level `await`; all blocks of a page share their names |
| `console` | each `$ command` is run in that folder; the lines after it must be its output, `...` matches anything |
| others | not run |

A comment before a block changes that: `<!-- not run: why -->`, `<!-- in another terminal -->` (a command that keeps
running while the rest of the page runs), `<!-- raises: ErrorName -->`.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import os
import re
import subprocess
import sys
import types
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from tampu import Queue, QueueEvents, Worker

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*?) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_FILE = re.compile(r"# (\w+\.py)\n")


@dataclass
class Block:
    kind: str
    text: str
    note: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(found["kind"], found["text"], found["note"] or "", text.count("\n", 0, found.start("text")) + 1)
        for found in _BLOCK.finditer(text)
    ]


def has_code(page: Path) -> bool:
    return any(block.kind in ("python", "console") for block in blocks_of(page))


@dataclass
class PageRun:
    """One run of one page."""

    page: Path
    folder: Path
    url: str
    names: dict[str, Any] = field(default_factory=dict)
    terminals: list[subprocess.Popen[str]] = field(default_factory=list)

    async def run(self) -> None:
        module = sys.modules["page"] = types.ModuleType("page")  # where classes and tasks of the page are looked up
        self.names = vars(module)
        sys.path.insert(0, str(self.folder))
        try:
            for block in blocks_of(self.page):
                await self._run_block(block)
        finally:
            sys.path.remove(str(self.folder))
            del sys.modules["page"]
            await self._clear_up()

    async def _run_block(self, block: Block) -> None:
        if block.note.startswith("not run"):
            return
        try:
            if block.kind == "console":
                await asyncio.to_thread(self._run_commands, block)
            elif block.kind == "python" and (saved := _FILE.match(block.text)):
                (self.folder / saved[1]).write_text(block.text)
            elif block.kind == "python":
                await self._run_python(block)
        except Exception as error:
            error.add_note(f"in {self.page.name}, line {block.line}")
            raise

    async def _run_python(self, block: Block) -> None:
        where = f"{self.page}:{block.line}"
        code = compile(block.text, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        wanted = block.note.removeprefix("raises: ") if block.note.startswith("raises: ") else None
        try:
            result = eval(code, self.names)
            if inspect.isawaitable(result):
                await asyncio.wait_for(result, 60)
        except Exception as error:
            if type(error).__name__ != wanted:
                raise
        else:
            assert wanted is None, f"it does not raise {wanted}"

    def _run_commands(self, block: Block) -> None:
        for found in re.finditer(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
            command, expected = found[1].split("  #")[0].strip(), found[2]
            if block.note.startswith("in another terminal"):
                self._start(command, expected)
            else:
                done = self._popen(command)
                output, _ = done.communicate(timeout=60)
                assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{output}"
                assert fits(expected, output), f"{command} printed\n{output}\nand not\n{expected}"

    def _popen(self, command: str) -> subprocess.Popen[str]:
        for name, program in (("tampu", f"{sys.executable} -m tampu.cli"), ("python", sys.executable)):
            command = re.sub(rf"^{name} ", f"{program} ", command)
        environment = os.environ | {"TAMPU_URL": self.url, "PYTHONPATH": str(self.folder), "COLUMNS": "120"}
        environment |= {"NO_COLOR": "1"} | ({} if is_installed_as_plugin() else {"PYTEST_PLUGINS": "tampu.testing"})
        return subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=environment,
        )

    def _start(self, command: str, expected: str) -> None:
        process = self._popen(command)
        self.terminals.append(process)
        assert process.stdout is not None
        output = ""
        while not fits(expected, output):
            line = process.stdout.readline()
            assert line, f"{command} ended after\n{output}"
            output += line

    async def _clear_up(self) -> None:
        for process in self.terminals:
            process.terminate()
        for process in self.terminals:
            process.communicate(timeout=30)
        found = [*self.names.values()]
        for worker in [one for one in found if isinstance(one, Worker)]:
            await worker.close()
        running = [one for one in found if isinstance(one, asyncio.Task)]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 20)
        for thing in found:
            if isinstance(thing, Queue | QueueEvents):
                await thing.close()


def is_installed_as_plugin() -> bool:
    """Return whether pytest loads tampu.testing as a plugin: not in an environment created before it was declared."""
    return any(point.value == "tampu.testing" for point in entry_points(group="pytest11"))


def fits(expected: str, output: str) -> bool:
    """Return whether an output is the expected one; `...` matches anything, including several lines."""
    pattern = re.escape(expected.strip()).replace(re.escape("..."), ".*")
    return re.fullmatch(pattern, output.strip(), re.DOTALL) is not None
