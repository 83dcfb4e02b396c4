"""The servers of a run: one with persistence whose clock can be set, a master with sentinels, or a Cluster."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

from servers.process import Server

CLOCK_SOURCE = Path(__file__).with_name("clock.c")


def compile_clock(folder: Path) -> Path | None:
    """Return the library that sets a server's clock; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, CLOCK_SOURCE, "-ldl"], check=True)
    return library


class ClockedServer(Server):
    """A server whose wall clock can be stepped, as `ntpd` or an operator would: `step_clock(ms)`."""

    def step_clock(self, ms: int) -> None:
        """Move the clock by `ms` in one step."""
        path = self.data_dir / "clock"
        (now,) = struct.unpack("<q", path.read_bytes())
        with path.open("r+b") as file:
            file.write(struct.pack("<q", now + ms))

    @property
    def can_step_clock(self) -> bool:
        return (self.data_dir / "clock.so").exists()

    def _command(self) -> list[str]:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        clock = self.data_dir / "clock"
        if not clock.exists():
            clock.write_bytes(struct.pack("<q", 0))
            compile_clock(self.data_dir)
        if not self.can_step_clock:
            return super()._command()
        env = shutil.which("env") or "/usr/bin/env"
        return [env, f"LD_PRELOAD={self.data_dir / 'clock.so'}", f"CHAOS_CLOCK={clock}", *super()._command()]


def persistent_server(binary: Path, folder: Path) -> ClockedServer:
    """Return a server that loses no confirmed write when it is killed: it syncs each write to disk first."""
    settings = {
        "appendonly": "yes",
        "appendfsync": "always",
        "busy-reply-threshold": "100",
        "auto-aof-rewrite-min-size": "256mb",
    }
    return ClockedServer("redis86", binary, folder, settings)


def fast_folder(default: Path) -> Path:
    """Return a folder in memory if there is one: a run syncs every write, and does not test the disk."""
    shared = Path("/dev/shm")
    if os.access(shared, os.W_OK):
        return shared / f"tampu-chaos-{os.getpid()}"
    return default
