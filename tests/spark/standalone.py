"""A standalone Spark cluster on this machine: a master and two workers, each a process of its own, ended by its pid."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

from servers.process import HOST, eventually, free_port
from spark.conftest import QUICK_JAVA

if TYPE_CHECKING:
    from types import TracebackType

DRIVER = Path(__file__).with_name("driver.py")
#: Small: many share this machine.
DAEMON_MEMORY = "192m"
#: How long a cluster may take to come up on a busy machine.
START_SECS = 120.0


def spark_home() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent


class StandaloneCluster:
    """`with StandaloneCluster(folder) as cluster: cluster.submit("sink", url)`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._drivers: list[subprocess.Popen[bytes]] = []
        self.port = free_port()

    @property
    def master(self) -> str:
        return f"spark://{HOST}:{self.port}"

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._start("master", "Master", "--host", HOST, "--port", str(self.port), "--webui-port", "0")
            eventually(lambda: "I have been elected leader" in self.log("master"), "a master", START_SECS)
            for number in (1, 2):
                options = ("--host", HOST, "--webui-port", "0", "-c", "1", "-m", "700m", "-d")
                work = str(self._folder / f"work-{number}")
                self._start(f"worker-{number}", "Worker", *options, work, self.master)
            for number in (1, 2):
                name = f"worker-{number}"
                eventually(lambda name=name: "Successfully registered" in self.log(name), name, START_SECS)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def submit(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a driver program on this cluster."""
        driver = start_driver(self._folder / f"driver-{len(self._drivers)}.log", self.master, *arguments)
        self._drivers.append(driver)
        return driver

    def executors(self) -> list[int]:
        """The pids of the executors that run now: children of our own workers."""
        found = []
        for daemon in self._daemons[1:]:
            with contextlib.suppress(FileNotFoundError):
                found += _children(daemon.pid)
        return found

    def kill_an_executor(self) -> None:
        """SIGKILL to one executor, once it is there; the Python workers under it end with it."""
        pid = eventually(self.executors, "an executor", START_SECS)[0]
        os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        for process in self._drivers + self._daemons[::-1]:
            end(process)

    def _start(self, name: str, role: str, *arguments: str) -> None:
        command = [str(spark_home() / "bin" / "spark-class"), f"org.apache.spark.deploy.{role.lower()}.{role}"]
        environment = os.environ | {"SPARK_DAEMON_MEMORY": DAEMON_MEMORY, "SPARK_LOCAL_IP": HOST}
        environment["JAVA_TOOL_OPTIONS"] = QUICK_JAVA  # of the daemons, and of the executors that they start
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen([*command, *arguments], stdout=log, stderr=log, env=environment)
        self._daemons.append(process)


def start_driver(log_path: Path, master: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A driver program in a process group of its own, so that its JVM can be killed with it."""
    source = Path(__file__).resolve().parents[2] / "src"
    environment = os.environ | {"SPARK_LOCAL_IP": HOST, "PYTHONPATH": str(source), "JAVA_TOOL_OPTIONS": QUICK_JAVA}
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(DRIVER), master, *arguments],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )


def kill_driver(driver: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a driver and its JVM, as when a machine goes away."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)
    driver.wait(30)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children")
    direct = [int(child) for child in text.read_text().split()] if text.exists() else []
    if not direct:  # Java starts processes from other threads
        for thread in Path(f"/proc/{pid}/task").iterdir():
            direct += [int(child) for child in (thread / "children").read_text().split()]
    return [child for child in direct if "CoarseGrainedExecutorBackend" in _command_line(child)]


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""
