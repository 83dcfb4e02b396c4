"""`tampu acl --role worker --queue emails`: prints the ACL SETUSER command of a user with the least privilege."""

from typing import Annotated

from typer import Option

from tampu.cli.options import choice_option, queue_option
from tampu.cli.output import say, write_json, write_line
from tampu.cli.session import CommonOptions, Session, parse_info
from tampu.errors import Error
from tampu.redis.acl import OPTIONAL, PURPOSES, ROLES, Role, acl_line, acl_rules

#: Oldest version whose ACL can restrict a key to reading.
READ_KEYS_VERSION = 7


def acl(
    common: CommonOptions,
    role: Annotated[Role, choice_option(ROLES, "--role", help="Role of the user.")],
    queue: Annotated[str | None, queue_option(help="Queue that the user may access. Default: all queues.")] = None,
    user: Annotated[str | None, Option(help="User name. Default: QUEUE-ROLE, or all-ROLE.")] = None,
) -> None:
    """Print an ACL SETUSER command that gives a user only the permissions that its role needs.

    The rules are generated for the server at --url. If it cannot be reached, the command prints rules that load on
    every supported server.
    """
    lacks, read_keys = set(OPTIONAL), False
    try:
        lacks, read_keys = common.run(_ask)
    except (Error, OSError) as error:
        say(f"the server cannot be asked ({error}): these rules load on Redis 6.2 and newer, and on Valkey", "yellow")
    rules = acl_rules(role, queue, lacks=lacks, read_keys=read_keys)
    name = user or f"{queue or 'all'}-{role}"
    shown = {"user": name, "role": role, "purpose": PURPOSES[role], "queue": queue, "rules": rules}
    write_json(shown) if common.as_json else write_line(acl_line(name, rules))


async def _ask(session: Session) -> tuple[set[str], bool]:
    """Return the optional commands that the server lacks, and whether its ACL can restrict a key to reading."""
    client = await session.client()
    names = sorted(OPTIONAL)
    infos = await client.call("COMMAND", "INFO", *names)
    server = parse_info(await client.call("INFO", "server"))
    major = server.get("redis_version", "0").partition(".")[0]
    lacks = {name for name, info in zip(names, infos, strict=True) if not info}
    return lacks, major.isdigit() and int(major) >= READ_KEYS_VERSION
