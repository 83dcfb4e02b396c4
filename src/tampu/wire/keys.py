"""The names of a queue's keys. Each starts with the hash tag `{chasqui:Q}`: a queue lives in one Cluster slot."""

from __future__ import annotations

from tampu.base.checks import check_queue_name


class QueueKeys:
    """All keys of one queue, built once. Keys of the wire format first, then those only tampu uses."""

    __slots__ = (
        "cancel_marks",
        "delayed",
        "dlq",
        "events",
        "paused",
        "promoter_lock",
        "queue_name",
        "repeat",
        "replays",
        "scheduler_lock",
        "stream",
        "tag",
    )

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
        self.cancel_marks = f"{tag}:cancel"

    def dedup_marker(self, job_id: str) -> str:
        """Set while an explicit id may not be added again."""
        return f"{self.tag}:dlid:{job_id}"

    def delayed_index(self, job_id: str) -> str:
        """Holds the exact member of the delayed set, so that cancel need not scan."""
        return f"{self.tag}:didx:{job_id}"

    def cancel_mark(self, job_id: str) -> str:
        """Holds that a job is to be cancelled, or was, and why. `cancel_marks` lists those not carried out yet."""
        return f"{self.tag}:cancel:{job_id}"

    def result(self, job_id: str) -> str:
        """Holds the handler's return value."""
        return f"{self.tag}:result:{job_id}"

    def repeat_spec(self, spec_key: str) -> str:
        """Hash of one repeatable: `spec` and the counter `fired`."""
        return f"{self.tag}:repeat:spec:{spec_key}"

    def alive(self, group: str) -> str:
        """Lives for a day after the last renewal of a lease by any worker of the group."""
        return f"{self.tag}:alive:{group}"

    def grace(self, group: str) -> str:
        """Exists while no entry of the group may be taken over, after the server was unreachable."""
        return f"{self.tag}:grace:{group}"

    def takeovers(self, group: str) -> str:
        """Hash of the group's dead consumers: which worker takes over their entries, and until when alone."""
        return f"{self.tag}:takeovers:{group}"

    def owner(self, group: str, consumer_id: str) -> str:
        """Holds the token of the process that last renewed leases in this consumer's name."""
        return f"{self.tag}:owner:{group}:{consumer_id}"

    def heartbeat(self, group: str, consumer_id: str) -> str:
        """Holds what a worker last published about itself."""
        return f"{self.tag}:worker:{group}:{consumer_id}"

    def chain(self, chain_id: str) -> str:
        """State of one producer chain: the last window's number and the replies that may be asked for again."""
        return f"{self.tag}:pseq:{chain_id}"
