"""Creates servers by kind: private ones, and those shared by all tests of a run, each started on first use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from servers.cluster import Cluster
from servers.process import Server
from servers.require import require_server
from servers.tls import make_certificates


def make_server(
    kind: str, data_dir: Path, *, tls: bool = False, replicas: int = 0, **settings: Any
) -> Server | Cluster:
    """Create a server without starting it. `settings` go to its configuration file, with underscores for hyphens.

    `tls=True` gives it a certificate from a private authority; `replicas` is per master, for a Cluster only;
    `replicaof` takes another `Server`.
    """
    binary = Path(require_server(kind, tls=tls))
    lines = {name.replace("_", "-"): str(value) or '""' for name, value in settings.items()}
    if isinstance(master := settings.get("replicaof"), Server):
        lines["replicaof"] = "{} {}".format(*master.address)
        if master.password:
            lines["masterauth"] = master.password
    if kind == "cluster86":
        if tls:
            raise ValueError("the test Cluster does not support TLS")
        return Cluster(kind, binary, data_dir, replicas, lines)
    if replicas:
        raise ValueError("replicas=... is only for cluster86; for others start a second server with replicaof=...")
    certificates = make_certificates(data_dir / "tls") if tls else None
    return Server(kind, binary, data_dir, lines, certificates)


class SharedServers:
    """One server of each kind for the whole run, reset for each test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, Server | Cluster] = {}

    def get(self, kind: str) -> Server | Cluster:
        """Return the server of that kind, up and empty."""
        if kind not in self._running:
            server = make_server(kind, self._folder / kind)
            self._running[kind] = server  # before it starts, so that a partly started Cluster is stopped too
            server.start()
        self._running[kind].reset()
        return self._running[kind]

    def stop(self) -> None:
        while self._running:
            self._running.popitem()[1].stop()
