"""SeaweedFS, a real S3 server from PyPI, and a proxy in front of it that fails as servers and networks do."""

from __future__ import annotations

import http.client
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servers.process import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

START_SECS = 60.0


class SeaweedFS:
    """A server with two identities: one that may do everything, and one that may only read."""

    def __init__(self, folder: Path) -> None:
        master, volume, filer, self.port = (free_port() for _ in range(4))
        identities = [
            {"name": name, "credentials": [{"accessKey": name, "secretKey": f"{name}-secret"}], "actions": actions}
            for name, actions in (("writer", ["Admin", "Read", "Write", "List"]), ("reader", ["Read", "List"]))
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        (folder / "data").mkdir()
        program = shutil.which("weed", path=str(Path(sys.executable).parent)) or "weed"
        command = [program, f"-logdir={folder}", "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1"]
        # By default their second ports are 10,000 higher, where the kernel chooses ports of clients.
        command += [f"-{part}.port.grpc={free_port()}" for part in ("master", "volume", "filer", "s3")]
        command += ["-ip.bind=127.0.0.1", f"-master.port={master}", f"-volume.port={volume}", "-filer"]
        command += [f"-filer.port={filer}", "-s3", f"-s3.port={self.port}", f"-s3.config={folder / 's3.json'}"]
        command += [
            "-master.telemetry=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.volumeSizeLimitMB=64",
            "-volume.max=200",
        ]
        self.url = f"http://127.0.0.1:{self.port}"
        with (folder / "weed.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECS
        while not self._is_ready():
            assert self._process.poll() is None, (folder / "weed.log").read_text()[-2000:]
            assert time.monotonic() < deadline, "SeaweedFS does not start"
            time.sleep(0.2)

    def options(self, identity: str = "writer", url: str = "") -> dict[str, str]:
        """Return the storage options of an identity."""
        return {
            "aws_endpoint_url": url or self.url,
            "aws_access_key_id": identity,
            "aws_secret_access_key": f"{identity}-secret",
            "aws_region": "us-east-1",
            "aws_allow_http": "true",
        }

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _is_ready(self) -> bool:
        """Return whether an object can be written: the parts of the server find each other one after the other."""
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        options = {key: value for key, value in self.options().items() if key != "aws_allow_http"}
        settings: Any = {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 0}, "config": options}
        store = from_url("s3://lake", **settings)
        try:
            store.put("ready", b"yes")
        except BaseError:
            return False
        store.delete("ready")
        return True


@contextmanager
def proxy(target: SeaweedFS, answer: Callable[[Handler], bool]) -> Iterator[str]:
    """Yield the URL of a proxy; `answer` may answer a request itself, or change it, before it is passed on."""
    handler = type("Bound", (Handler,), {"target": target, "answer": staticmethod(answer)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def failing(share: float, seed: int = 1) -> Callable[[Handler], bool]:
    """Return an `answer` that fails this share of requests: with 503, or by cutting the connection before or after."""
    rng = random.Random(seed)

    def answer(handler: Handler) -> bool:
        if rng.random() >= share:
            return False
        kind = rng.randrange(3)
        if kind == 0:
            handler.send_error(503)
        elif kind == 1:
            handler.close_connection = True
        else:  # the server has done it, and the client does not know
            handler.forward()
            handler.close_connection = True
        return True

    return answer


class Handler(BaseHTTPRequestHandler):
    """Passes on one request."""

    protocol_version = "HTTP/1.1"
    target: SeaweedFS
    answer: Callable[[Handler], bool]

    def forward(self) -> tuple[http.client.HTTPResponse, bytes]:
        client = http.client.HTTPConnection("127.0.0.1", self.target.port, timeout=60)
        try:
            client.request(self.command, self.path, self.body, dict(self.headers.items()))
            reply = client.getresponse()
            return reply, reply.read()
        finally:
            client.close()

    def handle_request(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.answer(self):
            return
        reply, body = self.forward()
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = reply.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_request  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        pass
