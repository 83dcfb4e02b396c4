"""PyRSMQ: one message after the other."""

import contextlib
from urllib.parse import urlsplit

from rsmq.cmd.exceptions import QueueAlreadyExists

from bench.program.driver import serve
from bench.program.payloads import MESSAGE
from bench.program.stopwatch import Stopwatch
from rsmq import RedisSMQ


def _queue(url):
    where = urlsplit(url)
    queue = RedisSMQ(host=where.hostname, port=where.port, qname="bench")
    with contextlib.suppress(QueueAlreadyExists):
        queue.createQueue().execute()
    return queue


def send(url, total):
    queue = _queue(url)
    queue.sendMessage(message=MESSAGE).execute()
    watch = Stopwatch()
    for _ in range(total):
        queue.sendMessage(message=MESSAGE).execute()
    return watch.stop(total)


def receive_delete(url, total):
    queue = _queue(url)
    for _ in range(total):
        queue.sendMessage(message=MESSAGE).execute()
    watch = Stopwatch()
    for _ in range(total):
        queue.deleteMessage(id=queue.receiveMessage().execute()["id"]).execute()
    return watch.stop(total)


if __name__ == "__main__":
    serve(
        "pyrsmq",
        {"rsmq-send": send, "rsmq-receive-delete": receive_delete},
        packages=("PyRSMQ",),
        settings={"adding": "sendMessage, one after the other", "working": "receiveMessage, then deleteMessage"},
    )
