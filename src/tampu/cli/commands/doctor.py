"""`tampu doctor [QUEUE]`: checks servers and queues, prints the findings with their fixes, exits with 3 on a problem.

This file has the command and the checks of a server: version, capabilities, eviction, persistence, memory, clock,
replication. Each is a function of the server's replies (mostly INFO), so that it can be tested without such a server.
`doctor_queues.py` checks queues and their workers.
"""

import time
from collections import defaultdict
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Group
from rich.text import Text
from typer import Option

from tampu.base.units import duration, plural, size
from tampu.cli.commands.doctor_queues import Finding, Level, Limits, check_queue, note, ok, wrong
from tampu.cli.errors import BREACHED
from tampu.cli.options import OptionalQueueName
from tampu.cli.output import cell, printable, progress_bar, show, write_json
from tampu.cli.session import CommonOptions, Session, parse_info, product_version
from tampu.cli.tables import table
from tampu.cli.units import parse_duration
from tampu.inspect.registry import ANY_KEY
from tampu.redis.client import Client
from tampu.redis.faults import ServerError
from tampu.redis.scripts import Capabilities, probe_capabilities

_SIGNS = {Level.OK: ("✓", "green"), Level.NOTE: ("·", "yellow"), Level.WRONG: ("✗", "bold red")}

#: Oldest supported version.
OLDEST_VERSION = (6, 2)
#: Share of its memory limit above which a server counts as full.
FULL_SHARE = 0.8
#: Maximum difference between clocks, in milliseconds.
MAX_SKEW_MS = 1000
#: Maximum replication lag, in seconds.
MAX_REPLICA_LAG_SECS = 10
#: Shorter server-side idle timeouts cut off workers that wait for jobs, in seconds.
SHORTEST_TIMEOUT_SECS = 30

Info = dict[str, str]


def doctor(
    common: CommonOptions,
    queue: OptionalQueueName = None,
    max_age: Annotated[str, Option(metavar="DURATION", help="Report jobs that have waited longer than this.")] = "5m",
    claim_after: Annotated[
        str,
        Option(
            metavar="DURATION",
            help="The workers' --claim-after. A job whose lease is not renewed for twice as long counts as stalled.",
        ),
    ] = "30s",
) -> None:
    """Check the server and the queues, and say how to fix each problem. Exits with 3 if it finds any."""
    limits = Limits(parse_duration(max_age) * 1000, parse_duration(claim_after) * 1000)
    findings = common.run(_check, queue, limits)
    faults = [finding for finding in findings if finding.level is Level.WRONG]
    if common.as_json:
        write_json({"healthy": not faults, "findings": [finding.to_json() for finding in findings]})
    else:
        show(_view(findings))
    if faults:
        raise typer.Exit(BREACHED)


async def _check(session: Session, name: str | None, limits: Limits) -> list[Finding]:
    findings: list[Finding] = []
    for place, client in await session.nodes():
        findings += await check_server(client, place)
    # On a Cluster, probe one node only: the others refuse commands about this key.
    capabilities = await check_capabilities(await session.client(), ANY_KEY.decode())
    findings.append(replace(capabilities, about=findings[0].about))
    admins = await session.admins(name)
    with progress_bar("checking queues", len(admins)) as done:
        for number, admin in enumerate(admins, 1):
            try:
                findings += await check_queue(admin, limits)
            except ServerError as error:
                findings.append(replace(wrong("queue", f"cannot be checked: {error}", ""), about=admin.name))
            done(number)
    if name is None:
        unusable = (await session.find_queues()).unusable
        findings += [note("name", f"a queue name is not UTF-8 or contains braces: {each!r}") for each in unusable]
    return findings


def _view(findings: list[Finding]) -> Group:
    parts: list[Text | object] = []
    for about in dict.fromkeys(finding.about for finding in findings):
        rows = table("", "", "")
        rows.show_header = False
        for finding in [finding for finding in findings if finding.about == about]:
            sign, style = _SIGNS[finding.level]
            words = cell(finding.text, style if finding.level is Level.WRONG else "")
            if finding.remedy:
                words.append(f"\n→ {printable(finding.remedy)}", style="dim")
            rows.add_row(Text(sign, style=style), Text(finding.check, style="dim"), words)
        parts += [cell(about or "server", "bold"), rows]
    count = sum(finding.level is Level.WRONG for finding in findings)
    verdict = Text(f"{plural(count, 'problem')} found" if count else "no problems found")
    verdict.stylize("bold red" if count else "green")
    return Group(*parts, verdict)  # type: ignore[arg-type]  # all parts are renderable


# --- checks of a server


async def check_server(client: Client, name: str) -> list[Finding]:
    """Run all checks of one server except its capabilities."""
    info = parse_info(await client.call("INFO", "everything"))
    findings = [
        version(info),
        eviction(info),
        persistence(info, await _config(client, "save")),
        memory(info),
        clock(await skew_ms(client)),
        replication(info),
        *idle_timeout(await _config(client, "timeout")),
    ]
    return [replace(finding, about=name) for finding in findings]


async def check_capabilities(client: Client, routing_key: str) -> Finding:
    """Check which optional commands the server supports, by trying them."""
    try:
        found = await probe_capabilities(await client.up(), routing_key)
        if "script_flags" in found.denied:  # a user without scripts: Redis 7 added EVAL_RO together with the flags
            [eval_ro] = await client.call("COMMAND", "INFO", "EVAL_RO")
            found = replace(found, script_flags=bool(eval_ro), denied=found.denied - {"script_flags"})
        return capability(found)
    except ServerError as error:  # a replica, or out of memory: other checks report that
        return note("capabilities", f"cannot be checked now: {error}")


async def _config(client: Client, option: str) -> str | None:
    """Return a setting, or None if CONFIG is not allowed, as on many hosted servers."""
    try:
        flat = await client.call("CONFIG", "GET", option)
    except ServerError:
        return None
    return flat[1].decode(errors="replace") if flat else None


async def skew_ms(client: Client) -> float:
    """Return how far the server's clock is ahead of the local one; the fastest of three samples counts."""
    samples: list[tuple[float, float]] = []
    for _ in range(3):
        before = time.time()
        seconds, microseconds = await client.call("TIME")
        after = time.time()
        ahead = (int(seconds) + int(microseconds) / 1e6) - (before + after) / 2
        samples.append((after - before, ahead * 1000))
    return min(samples)[1]


def version(info: Info) -> Finding:
    """Check that the server is new enough."""
    compatible = info.get("redis_version", "0").split(".")
    numbers = tuple(int(part) if part.isdigit() else 0 for part in compatible[:2])
    about = f"{product_version(info)}, {info.get('redis_mode') or info.get('server_mode') or 'standalone'}"
    if numbers < OLDEST_VERSION:
        return wrong("version", about, "use Redis 6.2 or newer, or Valkey")
    return ok("version", about)


def capability(found: Capabilities) -> Finding:
    """Report which optional commands the server has; tampu works without them."""
    names = {"xackdel": "XACKDEL", "read_claim": "XREADGROUP CLAIM", "script_flags": "script flags"}
    has = [name for field, name in names.items() if getattr(found, field)]
    denied = [names[field] for field in names if field in found.denied]
    lacks = [name for name in names.values() if name not in (*has, *denied)]
    text = f"native: {', '.join(has) or 'none'}"
    text += f"; emulated by scripts: {', '.join(lacks)}" if lacks else ""
    text += f"; not checked, because this user may not run them: {', '.join(denied)}" if denied else ""
    if "script flags" in lacks:
        return note("capabilities", f"{text}; jobs cannot be settled at maxmemory", "use Redis 7 or newer, or Valkey")
    return ok("capabilities", text)


def eviction(info: Info) -> Finding:
    """Check that keys are never evicted."""
    policy = info.get("maxmemory_policy", "unknown")
    if policy == "noeviction":
        return ok("eviction policy", policy)
    if policy == "unknown":
        return note("eviction policy", "not reported by the server", "make sure it is noeviction")
    return wrong(
        "eviction policy",
        f"{policy}: at maxmemory the server deletes keys, including jobs",
        "CONFIG SET maxmemory-policy noeviction, also in redis.conf",
    )


def persistence(info: Info, save: str | None) -> Finding:
    """Check that jobs survive a restart, and that the last write succeeded."""
    check = "persistence"
    if info.get("aof_enabled") == "1":
        if info.get("aof_last_write_status", "ok") != "ok":
            return wrong(check, "the append-only file cannot be written", "check the server's disk and log")
        return ok(check, "append-only file")
    if save == "":
        return wrong(check, "none: a restart loses every job", "CONFIG SET appendonly yes, also in redis.conf")
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        return wrong(check, "the last snapshot failed", "check the server's disk and log")
    if save is None:
        text = "no append-only file; snapshots cannot be checked, because CONFIG GET is not allowed"
        return note(check, text, "CONFIG SET appendonly yes")
    return note(check, "snapshots only: a crash loses all jobs since the last one", "CONFIG SET appendonly yes")


def memory(info: Info) -> Finding:
    """Check how much memory is left."""
    used, limit = _number(info, "used_memory"), _number(info, "maxmemory")
    if limit:
        text = f"{size(used)} of maxmemory {size(limit)} ({used / limit:.0%})"
        if used > limit * FULL_SHARE:
            return wrong("memory", text, "raise maxmemory, or add workers to drain the queues")
        return ok("memory", text)
    system = _number(info, "total_system_memory")
    if system and used > system * FULL_SHARE:
        text = f"{size(used)} of the machine's {size(system)}, no maxmemory"
        return wrong("memory", text, "set maxmemory with noeviction: adds then fail instead of crashing the server")
    return ok("memory", f"{size(used)}, no maxmemory")


def _number(info: Info, name: str) -> int:
    text = info.get(name, "0")
    return int(text) if text.isdigit() else 0


def clock(ahead_ms: float) -> Finding:
    """Compare the server's clock, which measures delays, with the local one, which sets times for delayed jobs."""
    text = f"the server is {duration(round(abs(ahead_ms)))} {'ahead of' if ahead_ms >= 0 else 'behind'} this machine"
    if abs(ahead_ms) > MAX_SKEW_MS:
        return wrong("clock", text, "run NTP on both: jobs added for a point in time run early or late by that much")
    return ok("clock", text)


def replication(info: Info) -> Finding:
    """Check the server's role and the lag of its replicas."""
    check = "replication"
    if info.get("role") == "slave":
        text = f"this is a replica (link to its master: {info.get('master_link_status', 'unknown')})"
        remedy = "use the master's URL, or redis+sentinel:// or redis+cluster://"
        return wrong(check, f"{text}: jobs cannot be added", remedy)
    texts = [value for name, value in info.items() if name.startswith("slave") and name[5:].isdigit()]
    replicas = [dict(part.split("=", 1) for part in text.split(",")) for text in texts]
    if not replicas:
        return note(check, "no replica: the server's disk is the only copy")
    late = [
        replica
        for replica in replicas
        if replica.get("state") != "online" or int(replica.get("lag", "0")) > MAX_REPLICA_LAG_SECS
    ]
    if late:
        names = ", ".join("{ip}:{port} ({state}, {lag} s)".format_map(defaultdict(str, replica)) for replica in late)
        return wrong(check, f"behind or not connected: {names}", "check these replicas and the network to them")
    return ok(check, f"{plural(len(replicas), 'replica')}, all up to date")


def idle_timeout(timeout: str | None) -> list[Finding]:
    """Check whether the server closes idle connections."""
    if timeout is None or not timeout.isdigit() or not 0 < int(timeout) < SHORTEST_TIMEOUT_SECS:
        return []
    text = f"the server closes connections that are idle for {timeout} s"
    return [note("idle timeout", f"{text}: workers and producers keep reconnecting", "CONFIG SET timeout 0")]
