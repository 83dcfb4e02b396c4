"""`tampu add` refuses payloads that are too large for a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cli.lab import invoke
from support.queues import QueueView

if TYPE_CHECKING:
    from servers.process import Server


@pytest.mark.usefixtures("url")
def test_adding_a_large_payload_says_what_to_do(server: Server) -> None:
    done = invoke("add", "q", "large", "-", stdin='"' + "x" * 2_000_000 + '"')
    assert done.code != 0
    assert "max_payload_bytes (1,048,576)" in done.complaint
    assert QueueView(server, "q").length() == 0
