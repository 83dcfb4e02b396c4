"""ACL rules with the least privilege for each role: what a user of one queue, or of all queues, may do.

The rules load on every supported server: commands that older servers lack are left out unless the server has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from tampu.base.checks import check_queue_name, check_text, invalid
from tampu.redis.nodes import CHANGES_CHANNEL

if TYPE_CHECKING:
    from collections.abc import Collection

Role = Literal["producer", "worker", "operator", "inspector", "dashboard", "doctor"]
ROLES: tuple[Role, ...] = get_args(Role)

#: What each role is for.
PURPOSES: dict[Role, str] = {
    "producer": "adds jobs and schedules, waits for results",
    "worker": "runs jobs; the promoter and the scheduler are part of it",
    "operator": "cancels, replays, removes, purges, pauses and deletes",
    "inspector": "reads the state of jobs and queues on the command line",
    "dashboard": "reads the state and follows events",
    "doctor": "runs `tampu doctor`, which also reads the server's INFO",
}

#: Commands that some supported servers lack; tampu does without them.
OPTIONAL = frozenset({"xackdel"})

# Logging in, finding the server through Sentinel or Cluster, and the client's name.
_CONNECT = "auth select client|setname role asking cluster|slots"
_SCRIPTS = "script|load evalsha"
# Large jobs are added in a transaction; its script takes them back if the queue is full.
_TRANSACTIONS = "multi exec eval xrevrange xdel"
_READ = """
    exists get hget hgetall hlen hmget mget pttl time ttl type scan memory|usage
    xinfo|consumers xinfo|groups xinfo|stream xlen xpending xrange xrevrange
    zcard zcount zrange zrangebyscore zscan zscore
"""
_COMMANDS: dict[Role, str] = {
    "producer": f"""
        {_SCRIPTS} {_TRANSACTIONS} wait time
        del expire get hdel hexists hget hgetall hincrby hlen hmget hrandfield hset hsetnx mget pexpire set exists ttl
        xadd xlen xread xrange zadd zcount zrangebyscore zrem zscore
    """,
    "worker": f"""
        {_SCRIPTS} {_TRANSACTIONS} client|id client|unblock time
        client|tracking subscribe ping
        del exists expire pexpire get mget set pttl ttl
        hdel hexists hget hgetall hincrby hlen hmget hrandfield hscan hset hsetnx
        xack xackdel xadd xclaim xgroup|create xgroup|createconsumer xgroup|delconsumer xgroup|setid
        xinfo|consumers xinfo|groups xinfo|stream xlen xpending xrange xread xreadgroup
        zadd zcard zcount zmscore zrange zrangebylex zrangebyscore zrem zremrangebyscore zscore
    """,
    "operator": f"""
        {_SCRIPTS} {_READ}
        del expire hdel hexists hincrby hscan hset set unlink xack xadd xclaim xdel xgroup|setid xread xtrim
        zadd zrangebylex zrem zremrangebyscore
    """,
    # The roles that read have no scripts: an endless one stops the server for all users.
    "inspector": _READ,
    "dashboard": f"{_READ} xread",
    # Without CONFIG GET, which would show the server's password; `doctor` does without it.
    "doctor": f"{_READ} info command",
}
#: Characters that a server treats as whitespace.
_WHITESPACE = frozenset(" \t\n\v\f\r")
#: Roles that change nothing: their keys can be restricted to reading (`%R~`) on Redis 7 and Valkey.
READ_ONLY: frozenset[Role] = frozenset({"inspector", "dashboard", "doctor"})


def acl_rules(
    role: Role, queue: str | None = None, *, lacks: Collection[str] = OPTIONAL, read_keys: bool = False
) -> list[str]:
    """Return the rules of a role for one queue, or for all queues, as arguments of ACL SETUSER.

    `lacks` names commands that the server does not have. `read_keys` restricts a role that only reads to reading its
    keys, which Redis 6.2 cannot.
    """
    if role not in ROLES:
        raise invalid("role", role, f"one of {', '.join(ROLES)}")
    name = "" if queue is None else literal_glob(_unspaced("queue", check_queue_name(queue))) + "}"
    keys = f"{{chasqui:{name}*"
    is_reader = read_keys and role in READ_ONLY
    commands = sorted({*_CONNECT.split(), *_COMMANDS[role].split()} - set(lacks))
    # On a Cluster, workers receive reports of changed keys on this channel. Like SCAN, which other roles need, it can
    # show the names of all keys, including those that the user may not read.
    channels = [f"&{CHANGES_CHANNEL}"] if role == "worker" else []
    return [
        *(f"{'%R~' if is_reader else '~'}{keys}", "resetchannels", *channels, "-@all"),
        *(f"+{command}" for command in commands),
    ]


def acl_line(user: str, rules: list[str], password: str = "PASSWORD") -> str:  # noqa: S107 - a place to fill in
    """Return the ACL SETUSER command, with a place for the password."""
    name = _unspaced("user", check_text("user", user))
    return " ".join(("ACL SETUSER", _quoted(name), "reset on", f">{password}", *map(_quoted, rules)))


def _unspaced(field: str, name: str) -> str:
    """Return a name. Raises `ConfigError` if it has whitespace, which servers refuse in users and key patterns."""
    if not _WHITESPACE.isdisjoint(name):
        raise invalid(field, name, "text without whitespace, which ACL rules cannot contain")
    return name


def _quoted(argument: str) -> str:
    """Return an argument as redis-cli reads it: inside quotes a backslash escapes, outside it stands for itself."""
    if argument.isprintable() and not {'"', "'"}.intersection(argument):
        return argument
    return '"' + "".join(map(_escaped, argument)) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else "".join(f"\\x{byte:02x}" for byte in character.encode())


def literal_glob(text: str) -> str:
    """Return a glob pattern that matches exactly this text."""
    return "".join(f"\\{character}" if character in "*?[]^\\" else character for character in text)
