"""Runs one job, encoded by hand, through an embedded Valkey: what `make demo` shows until the engine lands."""

from __future__ import annotations

import time

import msgspec
import redis

from tampu.embedded import EmbeddedServer

STREAM = "{chasqui:demo}:stream"
GROUP = "default"


def main() -> None:
    with EmbeddedServer() as server, redis.Redis.from_url(server.url, protocol=2) as client:
        print(f"Started an embedded Valkey {client.info('server')['valkey_version']} at {server.url}")

        # The envelope of the wire format: [id, payload, created at (ms), attempt], the payload in bytes of its own.
        payload = msgspec.msgpack.encode({"to": "ada@example.org", "subject": "Welcome"})
        envelope = msgspec.msgpack.encode(["01JD3M0DEM0000000000000000", payload, time.time_ns() // 1_000_000, 0])
        entry = client.xadd(STREAM, {"d": envelope})
        print(f"Added one job of {len(envelope)} bytes to {STREAM} as entry {entry.decode()}")

        client.xgroup_create(STREAM, GROUP, id="0")
        [[_, [(entry, fields)]]] = client.xreadgroup(GROUP, "worker-1", {STREAM: ">"}, count=1)
        job_id, body, created_at_ms, attempt = msgspec.msgpack.decode(fields[b"d"])
        print(f"A worker read job {job_id}, attempt {attempt}, added {time.time() * 1000 - created_at_ms:.0f} ms ago")
        print(f"Its payload: {msgspec.msgpack.decode(body)}")

        client.xack(STREAM, GROUP, entry)
        client.xdel(STREAM, entry)
        print(f"Acknowledged and deleted: {client.xlen(STREAM)} jobs are left")
    print("Stopped the server; its data are gone.")


if __name__ == "__main__":
    main()
