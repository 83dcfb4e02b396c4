"""Loading scripts, with the files of `lua/lib/` that they include."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest

from support.clients import open_client
from tampu.redis import scripts
from tampu.redis.faults import ServerError
from tampu.redis.scripts import LUA, Script, load_script

if TYPE_CHECKING:
    from pathlib import Path

    from servers.process import Server

NAMES = sorted(file.name.removesuffix(".lua") for file in LUA.iterdir() if file.name.endswith(".lua"))
LIBRARY = sorted(file.name for file in (LUA / "lib").iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_an_include_takes_one_line_and_is_part_of_the_sha(name: str) -> None:
    script = load_script(name)
    source = (LUA / f"{name}.lua").read_text().splitlines()
    lines = script.text.splitlines()
    assert len(lines) == len(source)
    for line, written in zip(lines, source, strict=True):
        if "--@include" in written:
            assert (line[:6], line[-4:]) == ("local ", " end"), written
        else:
            assert line == written
    assert script.sha == hashlib.sha1(script.text.encode()).hexdigest()


@pytest.mark.parametrize("file", LIBRARY)
def test_comments_in_the_library_are_on_their_own_lines(file: str) -> None:
    """An include is joined into one line: a comment after code would comment out the rest."""
    for line in (LUA / "lib" / file).read_text().splitlines():
        assert "--" not in line or line.lstrip().startswith("--"), line


@pytest.mark.parametrize("file", LIBRARY)
def test_every_library_file_is_included_more_than_once(file: str) -> None:
    users = [name for name in NAMES if f"--@include lib/{file}\n" in (LUA / f"{name}.lua").read_text()]
    assert len(users) > 1


async def test_an_error_names_the_line_of_the_file(server: Server, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "piece.lua").write_text("-- Why.\nlocal function piece()\n  -- How.\n  return 1\nend\n")
    (tmp_path / "own.lua").write_text("--@include lib/piece.lua\n\nlocal one = piece()\nerror('here')\n")
    monkeypatch.setattr(scripts, "LUA", tmp_path)
    script: Script = load_script.__wrapped__("own")
    async with open_client(server.url, scripts=(script,)) as client:
        with pytest.raises(ServerError, match=r"user_script:4: here"):
            await client.run(script, (), ())
