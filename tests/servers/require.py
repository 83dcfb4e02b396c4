"""What a test needs and a laptop may lack: the test is skipped with a line saying so; with CI=true it fails."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest

from servers.binaries import KINDS, has_tls, server_binary

#: Tools by the name tests use: the names of their programs, and how to get them.
TOOLS = {
    "chromium": (("chromium", "chromium-browser", "google-chrome"), "apt install chromium, or install Chrome"),
    "java": (("java",), "apt install default-jre-headless, or any Java 17 or later"),
    "node": (("node", "nodejs"), "apt install nodejs, or any Node.js 18 or later"),
    "npm": (("npm",), "apt install npm; it comes with Node.js elsewhere"),
    "openssl": (("openssl",), "apt install openssl"),
}


def require(tool: str) -> str:
    """The path of a tool's program."""
    programs, remedy = TOOLS[tool]
    path = next(filter(None, map(shutil.which, programs)), None)
    if path is None:
        unavailable(tool, remedy)
    return path


def require_server(kind: str, *, tls: bool = False) -> str:
    """The path of a server's executable, with TLS built in if that is needed."""
    binary = server_binary(kind)
    if binary is None:
        unavailable(KINDS[kind].title, KINDS[kind].remedy)
    if tls and not has_tls(binary):
        unavailable(f"{KINDS[kind].title} with TLS", "see what `make servers` says about libssl-dev")
    return str(binary)


def unavailable(what: str, remedy: str) -> NoReturn:
    """Skips the test; with CI=true fails it, as a test that silently does not run in CI protects nothing."""
    line = f"{what} is missing: {remedy}"
    if os.environ.get("CI") == "true":
        pytest.fail(f"{line} (skipped on a laptop, a failure with CI=true)", pytrace=False)
    pytest.skip(line)
