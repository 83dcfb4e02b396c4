"""The options of `format("tampu")`, checked before any job starts. Errors name the option and what is allowed.

Names follow Spark's Kafka source where it has them. Spark passes them in lower case.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, cast

from tampu.base.checks import check_queue_name, invalid
from tampu.errors import ConfigError
from tampu.redis.settings import parse_url, resolve_url
from tampu.spark.read.offsets import BEFORE_ALL, LATEST, Position, parse_entry_id

if TYPE_CHECKING:
    from collections.abc import Mapping

Stream = Literal["events", "dlq", "jobs", "delayed", "repeat", "results"]
Payload = Literal["binary", "json", "none"]
Dedupe = Literal["chunk", "jobid", "none"]

STREAMS: tuple[Stream, ...] = ("events", "dlq", "jobs", "delayed", "repeat", "results")
#: Redis streams: entries have IDs, so reads can be split.
WITH_IDS: tuple[Stream, ...] = ("events", "dlq", "jobs")
#: Streams that only grow at the end, so a query can follow them. Workers delete jobs when they are done.
STREAMABLE: tuple[Stream, ...] = ("events", "dlq")

#: How long the sink remembers written chunks and job IDs, in seconds: 7 days.
DEFAULT_DEDUPE_TTL_SECS = 7 * 24 * 3600
#: Length of the jobs stream at which writing pauses, like the producer's limit.
DEFAULT_MAX_WAITING = 1_000_000
#: How long writing waits for a full queue before it fails, in seconds: an hour.
DEFAULT_WAIT_TIMEOUT_SECS = 3600

#: How long `minOffsetsPerTrigger` may hold back a micro-batch, in seconds: 15 minutes, as in Spark's Kafka source.
DEFAULT_MAX_TRIGGER_DELAY_SECS = 900

_READ = ("url", "queue", "subscribe", "subscribePattern", "stream", "payload")
_RANGE = (
    *("startingOffsets", "endingOffsets", "startingTimestamp", "endingTimestamp"),
    *("minPartitions", "failOnDataLoss", "pushdown"),
)
_STREAMING = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
_WRITE = ("url", "queue", "stream", "dedupe", "dedupeTtl", "name", "spread", "maxWaiting", "waitTimeout")
#: Spark's own options of a streaming query, which it passes on.
_OF_SPARK = ("checkpointlocation", "queryname", "outputmode")
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options of a read."""

    url: str
    queues: tuple[str, ...]
    stream: Stream
    #: `binary`: MessagePack; `json`: text, and `payload_raw` for what JSON cannot hold; `none`: no column.
    payload: Payload = "binary"
    #: Per queue the position that reading starts after; queues without one start at the first entry.
    starting: Mapping[str, Position] | Literal["earliest", "latest"] = "earliest"
    #: Per queue the last position to read; queues without one are read to the end.
    ending: Mapping[str, Position] = field(default_factory=dict)
    #: Entries from this time on, in epoch milliseconds. Overrides `starting`.
    starting_timestamp_ms: int | None = None
    #: Entries up to this time, in epoch milliseconds.
    ending_timestamp_ms: int | None = None
    #: Whether conditions of the query limit what is read.
    pushdown: bool = False
    #: Limits from conditions of the query: milliseconds of entry IDs, and kinds of events.
    first_ms: int | None = None
    last_ms: int | None = None
    events: frozenset[bytes] | None = None
    #: Regular expression for the names of queues, instead of `queues`. New queues are found while a stream runs.
    queue_pattern: str | None = None
    #: Maximum number of entries of one micro-batch, over all queues; 0 = no limit.
    max_offsets_per_trigger: int = 0
    #: A micro-batch waits for this many entries, over all queues, but not longer than `max_trigger_delay_secs`.
    min_offsets_per_trigger: int = 0
    max_trigger_delay_secs: float = DEFAULT_MAX_TRIGGER_DELAY_SECS
    #: Minimum number of partitions, if there are enough entries; 0 = by size.
    min_partitions: int = 0
    #: Whether entries that were trimmed before they were read are an error, or a warning.
    fail_on_data_loss: bool = True

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool | None = False) -> ReadOptions:
        """Return checked options; `ConfigError` (CMQ-004) names the wrong one. `streaming=None`: not known yet."""
        given = _Given(options)
        stream = cast("Stream", given.choice("stream", STREAMS, "events"))
        allowed: tuple[str, ...] = _READ
        if stream in WITH_IDS:
            allowed += _RANGE
        given.refuse_others(allowed + _STREAMING, known=_READ + _RANGE + _STREAMING, why=f"with stream={stream}")
        if streaming and stream not in STREAMABLE:
            raise ConfigError(
                f"option stream={stream} can only be read as a snapshot, with spark.read: "
                + ("jobs are deleted when they are done" if stream == "jobs" else "it has no order to follow")
                + f"; readStream supports {' and '.join(STREAMABLE)}"
            )
        for name in ("endingOffsets", "endingTimestamp", "pushdown"):
            if streaming and name.lower() in given.options:
                raise ConfigError(
                    f"option {name} is for spark.read: a stream has no end, and no filter is pushed to it"
                )
        for name in _STREAMING:
            if streaming is False and name.lower() in given.options:
                raise ConfigError(f"option {name} is for spark.readStream: a batch has no triggers")
        pattern = given.pattern()
        queues = given.queues(required=pattern is None)
        known = None if pattern is not None else queues
        starting = given.offsets("startingOffsets", known)
        if starting == "latest" and streaming is False:
            raise ConfigError("option startingOffsets=latest is for spark.readStream: a batch would read nothing")
        ending = given.offsets("endingOffsets", known)
        if ending == "earliest":
            raise ConfigError("option endingOffsets must be latest or JSON; with earliest, nothing would be read")
        most = given.number("maxOffsetsPerTrigger", 0, low=1)
        if 0 < most < len(queues):
            raise ConfigError(
                f"option maxOffsetsPerTrigger={most} is shared by {len(queues)} queues; use at least {len(queues)}"
            )
        least = given.number("minOffsetsPerTrigger", 0, low=1)
        if 0 < most < least:
            raise ConfigError(f"option minOffsetsPerTrigger={least} must not exceed maxOffsetsPerTrigger={most}")
        if "maxtriggerdelay" in given.options and not least:
            raise ConfigError("option maxTriggerDelay limits the wait of option minOffsetsPerTrigger: give both")
        timestamp_ms = given.instant_ms("startingTimestamp")
        if timestamp_ms is not None and "startingoffsets" in given.options:
            raise ConfigError("options startingTimestamp and startingOffsets cannot be combined: set only one")
        ending_ms = given.instant_ms("endingTimestamp")
        if ending_ms is not None and "endingoffsets" in given.options:
            raise ConfigError("options endingTimestamp and endingOffsets cannot be combined: set only one")
        return cls(
            url=given.url(),
            queues=queues,
            stream=stream,
            payload=cast("Payload", given.choice("payload", ("binary", "json", "none"), "binary")),
            starting=starting or "earliest",
            ending={} if ending is None or isinstance(ending, str) else ending,
            starting_timestamp_ms=timestamp_ms,
            ending_timestamp_ms=ending_ms,
            pushdown=given.flag("pushdown", False),
            queue_pattern=pattern,
            max_offsets_per_trigger=most,
            min_offsets_per_trigger=least,
            max_trigger_delay_secs=given.duration_secs("maxTriggerDelay", DEFAULT_MAX_TRIGGER_DELAY_SECS),
            min_partitions=given.number("minPartitions", 0, low=1),
            fail_on_data_loss=given.flag("failOnDataLoss", True),
        )


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """Options of a write. `queue` is None if the column `queue` names it."""

    url: str
    queue: str | None
    stream: Literal["jobs", "dlq"] = "jobs"
    dedupe: Dedupe = "chunk"
    dedupe_ttl_secs: int = DEFAULT_DEDUPE_TTL_SECS
    #: Name of jobs without a column `name`.
    name: str = ""
    #: Random delay of each job, up to this many milliseconds; 0 = none.
    spread_ms: int = 0
    #: Writing pauses while more jobs than this wait.
    max_waiting: int = DEFAULT_MAX_WAITING
    #: How long writing pauses before it fails, in seconds.
    wait_timeout_secs: float = DEFAULT_WAIT_TIMEOUT_SECS

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool = False) -> WriteOptions:
        """Return checked options; `ConfigError` (CMQ-004) names the wrong one."""
        given = _Given(options)
        given.refuse_others(_WRITE, known=_READ + _RANGE + _STREAMING, why="when writing")
        stream = given.choice("stream", STREAMS, "jobs")
        if stream not in ("jobs", "dlq"):
            raise ConfigError(
                f"option stream={stream} cannot be written: jobs adds jobs (delayed ones by a column run_at), "
                "dlq replays dead letters"
            )
        if stream == "dlq":
            for name in ("dedupe", "spread"):
                if name in given.options:
                    raise ConfigError(f"option {name} is for stream=jobs: a replay moves each letter only once anyway")
            if streaming:
                raise ConfigError("option stream=dlq cannot be written by a stream: replay with df.write")
        queues = given.queues(required=False)
        if len(queues) > 1:
            raise ConfigError("option queue must name one queue: use a column named queue for several")
        return cls(
            url=given.url(),
            queue=queues[0] if queues else None,
            stream=cast("Literal['jobs', 'dlq']", stream),
            dedupe=cast("Dedupe", given.choice("dedupe", ("chunk", "jobid", "none"), "chunk")),
            dedupe_ttl_secs=int(given.duration_secs("dedupeTtl", DEFAULT_DEDUPE_TTL_SECS)) or 1,
            name=given.options.get("name", ""),
            spread_ms=round(given.duration_secs("spread", 0) * 1000),
            max_waiting=given.number("maxWaiting", DEFAULT_MAX_WAITING, low=1),
            wait_timeout_secs=given.duration_secs("waitTimeout", DEFAULT_WAIT_TIMEOUT_SECS),
        )


class _Given:
    """The options as given, parsed one by one."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = {key.lower(): value for key, value in options.items() if key.lower() not in _OF_SPARK}
        if "provider" in self.options:
            raise ConfigError(
                "format tampu cannot be a catalog table: Spark does not pass on its options when it is read. "
                "Use CREATE TEMPORARY VIEW ... USING tampu OPTIONS (...)"
            )

    def refuse_others(self, allowed: tuple[str, ...], known: tuple[str, ...], why: str) -> None:
        allowed_keys = {name.lower() for name in allowed}
        names = {name.lower(): name for name in (*allowed, *known)}
        for key in self.options:
            if key in allowed_keys:
                continue
            if key == "path":
                raise ConfigError(
                    "format tampu takes no path: set option queue, and call load() or save() without a path"
                )
            if key in names:
                raise ConfigError(f"option {names[key]} is not allowed {why}; allowed are {', '.join(allowed)}")
            raise ConfigError(f"unknown option {key!r}; allowed are {', '.join(allowed)}")

    def url(self) -> str:
        return check_shared_url(resolve_url(self.options.get("url")), "option url")

    def queues(self, *, required: bool = True) -> tuple[str, ...]:
        if "queue" in self.options and "subscribe" in self.options:
            raise ConfigError("options queue and subscribe are two names for the same option: set only one")
        given = self.options.get("queue") or self.options.get("subscribe") or ""
        names = tuple(filter(None, (part.strip() for part in given.split(","))))
        if not names and required:
            raise ConfigError("option queue is missing: set it to one or more queue names, separated by commas")
        if len(set(names)) < len(names):
            raise invalid("option queue", given, "names that differ")
        return tuple(check_queue_name(name, "option queue") for name in names)

    def pattern(self) -> str | None:
        text = self.options.get("subscribepattern")
        if text is None:
            return None
        if "queue" in self.options or "subscribe" in self.options:
            raise ConfigError("options subscribePattern and queue cannot be combined: give one")
        try:
            re.compile(text)
        except re.error as error:
            raise invalid("option subscribePattern", text, f"a regular expression: {error}") from None
        return text

    def choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.options.get(name.lower(), default).lower()
        if value not in allowed:
            raise invalid(f"option {name}", value, f"one of {', '.join(allowed)}")
        return value

    def number(self, name: str, default: int, *, low: int) -> int:
        text = self.options.get(name.lower())
        if text is None:
            return default
        if not (text.isascii() and text.isdigit()) or int(text) < low:
            raise invalid(f"option {name}", text, f"a whole number of {low} or more")
        return int(text)

    def flag(self, name: str, default: bool) -> bool:
        text = self.options.get(name.lower(), str(default)).lower()
        if text not in ("true", "false"):
            raise invalid(f"option {name}", text, "true or false")
        return text == "true"

    def duration_secs(self, name: str, default: float) -> float:
        text = self.options.get(name.lower())
        return default if text is None else parse_duration(text, f"option {name}")

    def instant_ms(self, name: str) -> int | None:
        text = self.options.get(name.lower())
        if text is None:
            return None
        if text.isascii() and text.isdigit():
            return int(text)
        try:
            instant = datetime.fromisoformat(text)
        except ValueError:
            raise invalid(f"option {name}", text, "epoch milliseconds, or a time such as 2026-01-31T08:00") from None
        return round((instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp() * 1000)

    def offsets(
        self, name: str, queues: tuple[str, ...] | None
    ) -> Mapping[str, Position] | Literal["earliest", "latest"] | None:
        text = self.options.get(name.lower())
        if text is None or text in ("earliest", "latest"):
            return cast("Literal['earliest', 'latest'] | None", text)
        wanted = 'earliest, latest, or JSON such as {"emails": "1700000000000-0"}'
        try:
            found: Any = json.loads(text)
        except ValueError:
            raise invalid(f"option {name}", text, wanted) from None
        if not isinstance(found, dict):
            raise invalid(f"option {name}", text, wanted)
        for queue in found:
            if queues is not None and queue not in queues:
                raise ConfigError(f"option {name} names queue {queue!r}, which is not in option queue")
        return {queue: offset_of(value, f"option {name}") for queue, value in found.items()}


def check_shared_url(url: str, where: str) -> str:
    """Return the URL. Raises `ConfigError` if it does not reach the same server from every process."""
    settings = parse_url(url)
    if settings.kind == "embedded" and settings.data_dir is None:
        raise ConfigError(
            f"{where}=embedded:// is a server of one process, and Spark runs several: use embedded:///some/folder, "
            "which they share, or the URL in tampu.embedded.server.acquire().url"
        )
    return url


def offset_of(value: Any, where: str) -> Position:
    """Return the position in JSON: an ID as text, or an object as in a checkpoint."""
    text = value.get("id") if isinstance(value, dict) else value
    if text == "earliest":
        return Position(BEFORE_ALL)
    if text == "latest":
        return LATEST
    if not isinstance(text, str):
        raise invalid(where, value, "a stream ID such as '1700000000000-0'")
    parse_entry_id(text, where)
    return Position.from_json(value)


def parse_duration(text: str, where: str) -> float:
    """Return a duration such as `250ms`, `10s`, `5m`, `6h` or `7d` in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", text.strip())
    if not found:
        raise invalid(where, text, "a duration such as 250ms, 10s, 5m, 6h or 7d")
    return float(found[1]) * _UNITS[found[2] or "s"]
