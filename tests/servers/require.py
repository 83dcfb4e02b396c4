"""Requirements of tests that a laptop may lack: the test is skipped with a message, and fails with CI=true."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest

from servers.binaries import KINDS, has_tls, server_binary

#: Tools by the name that tests use: the names of their programs, and how to install them.
TOOLS = {
    "chromium": (("chromium", "chromium-browser", "google-chrome"), "apt install chromium, or install Chrome"),
    "java": (("java",), "apt install default-jre-headless, or any Java 17 or later"),
    "node": (("node", "nodejs"), "apt install nodejs, or any Node.js 18 or later"),
    "npm": (("npm",), "apt install npm; it comes with Node.js elsewhere"),
    "openssl": (("openssl",), "apt install openssl"),
}


def require(tool: str) -> str:
    """Return the path of a tool."""
    programs, remedy = TOOLS[tool]
    path = next(filter(None, map(shutil.which, programs)), None)
    if path is None:
        unavailable(tool, remedy)
    return path


def require_server(kind: str, *, tls: bool = False) -> str:
    """Return the path of a server's executable, built with TLS if that is needed."""
    binary = server_binary(kind)
    if binary is None:
        unavailable(KINDS[kind].title, KINDS[kind].remedy)
    if tls and not has_tls(binary):
        unavailable(f"{KINDS[kind].title} with TLS", "see the output of `make servers` about libssl-dev")
    return str(binary)


def unavailable(what: str, remedy: str) -> NoReturn:
    """Skip the test. With CI=true fail it instead: a test that is silently skipped in CI protects nothing."""
    line = f"{what} is missing: {remedy}"
    if os.environ.get("CI") == "true":
        pytest.fail(f"{line} (skipped elsewhere, a failure with CI=true)", pytrace=False)
    pytest.skip(line)
