"""The names of a queue's keys. All start with the hash tag `{chasqui:Q}`, which keeps a queue in one Cluster slot."""

from __future__ import annotations

from tampu.base.checks import check_queue_name


class QueueKeys:
    """All keys of one queue: first those of the ChasquiMQ format, then those that only tampu uses."""

    def __init__(self, queue_name: str) -> None:
        self.queue_name = check_queue_name(queue_name)
        self.tag = tag = f"{{chasqui:{queue_name}}}"
        self.stream = f"{tag}:stream"
        self.delayed = f"{tag}:delayed"
        self.dlq = f"{tag}:dlq"
        self.events = f"{tag}:events"
        self.repeat = f"{tag}:repeat"
        self.promoter_lock = f"{tag}:promoter:lock"
        self.scheduler_lock = f"{tag}:scheduler:lock"
        self.replays = f"{tag}:replays"
        self.paused = f"{tag}:paused"
        self.paused_tasks = f"{tag}:paused-tasks"
        self.cancel_marks = f"{tag}:cancel"
        self.wake = f"{tag}:wake"
        self.peers = f"{tag}:peers"
        self.due = f"{tag}:due"

    @property
    def limits(self) -> str:
        """Return the key of the hash of the queue's limits; it exists while the queue is limited."""
        return f"{self.tag}:limits"

    @property
    def bell(self) -> str:
        """Return the stream that wakes a worker when a job of a limited queue may run."""
        return f"{self.tag}:bell"

    @property
    def gate(self) -> tuple[str, ...]:
        """Return the KEYS of the scripts that deliver the jobs of a limited queue: see `redis/lua/lib/gate.lua`."""
        tag = self.tag
        parts = (f"{tag}:{part}" for part in ("gate", "line", "turn", "cool", "parked", "slots"))
        return (self.stream, *parts, self.limits, self.bell)

    def dedup_marker(self, job_id: str) -> str:
        """Return the key that exists while an explicit id must not be added again."""
        return f"{self.tag}:dlid:{job_id}"

    def delayed_index(self, job_id: str) -> str:
        """Return the key of the member of a delayed job with an explicit id. The others are found through `due`."""
        return f"{self.tag}:didx:{job_id}"

    def cancel_mark(self, job_id: str) -> str:
        """Return the key that marks a job for cancelling, or as cancelled. `cancel_marks` lists the open requests."""
        return f"{self.tag}:cancel:{job_id}"

    def result(self, job_id: str) -> str:
        """Return the key of the handler's return value."""
        return f"{self.tag}:result:{job_id}"

    def repeat_spec(self, spec_key: str) -> str:
        """Return the key of a repeatable's hash: `spec` and the counter `fired`."""
        return f"{self.tag}:repeat:spec:{spec_key}"

    def alive(self, group: str) -> str:
        """Return the key that expires a day after the last lease renewal by any worker of the group."""
        return f"{self.tag}:alive:{group}"

    def grace(self, group: str) -> str:
        """Return the key that exists while no entry of the group may be reclaimed, after the server was unreachable."""
        return f"{self.tag}:grace:{group}"

    def takeovers(self, group: str) -> str:
        """Return the key of the hash of dead consumers: which worker takes over each, and until when exclusively."""
        return f"{self.tag}:takeovers:{group}"

    def leases(self, group: str) -> str:
        """Return the key of the hash with the duration of each consumer's leases, in milliseconds."""
        return f"{self.tag}:leases:{group}"

    def heartbeat(self, group: str, consumer_id: str) -> str:
        """Return the key of a worker's last heartbeat."""
        return f"{self.tag}:worker:{group}:{consumer_id}"

    def progress(self, job_id: str) -> str:
        """Return the key of the progress that a running job last reported."""
        return f"{self.tag}:progress:{job_id}"

    def chain(self, chain_id: str) -> str:
        """Return the key of a producer's chain: the last window's number, and replies that a resend may need."""
        return f"{self.tag}:pseq:{chain_id}"
