"""`tampu doctor [QUEUE]`: runs all checks, prints the findings, exits with 3 if there is a problem."""

from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Group
from rich.text import Text

from tampu.cli.commands.doctor.findings import Finding, Level, note, wrong
from tampu.cli.commands.doctor.queues import Limits, check_queue
from tampu.cli.commands.doctor.server import check_capabilities, check_server
from tampu.cli.errors import BREACHED
from tampu.cli.options import OptionalQueueName
from tampu.cli.output import cell, printable, progress_bar, show, write_json
from tampu.cli.session import ANY_KEY, CommonOptions, Session
from tampu.cli.tables import table
from tampu.cli.units import parse_duration, plural
from tampu.redis.faults import ServerError

_SIGNS = {Level.OK: ("✓", "green"), Level.NOTE: ("·", "yellow"), Level.WRONG: ("✗", "bold red")}


def doctor(
    common: CommonOptions,
    queue: OptionalQueueName = None,
    max_age: Annotated[
        str, typer.Option("--max-age", metavar="DURATION", help="Report jobs that have waited longer than this.")
    ] = "5m",
    claim_after: Annotated[
        str,
        typer.Option(
            "--claim-after",
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
    views = await session.views(name)
    with progress_bar("checking queues", len(views)) as done:
        for number, (client, keys) in enumerate(views):
            try:
                findings += await check_queue(client, keys, limits)
            except ServerError as error:
                findings.append(replace(wrong("queue", f"cannot be checked: {error}", ""), about=keys.queue_name))
            done(number + 1)
    if name is None:
        unusable = (await session.find_queues()).unusable
        findings += [note("name", f"a queue name is not UTF-8 or contains braces: {one!r}") for one in unusable]
    return findings


def _view(findings: list[Finding]) -> Group:
    parts: list[Text | object] = []
    for about in dict.fromkeys(finding.about for finding in findings):
        rows = table("", "", "")
        rows.show_header = False
        for finding in findings:
            if finding.about != about:
                continue
            sign, style = _SIGNS[finding.level]
            words = cell(finding.text, style if finding.level is Level.WRONG else "")
            if finding.remedy:
                words.append(f"\n→ {printable(finding.remedy)}", style="dim")
            rows.add_row(Text(sign, style=style), Text(finding.check, style="dim"), words)
        parts += [cell(about or "server", "bold"), rows]
    count = sum(finding.level is Level.WRONG for finding in findings)
    verdict = (
        Text(f"{plural(count, 'problem')} found", style="bold red")
        if count
        else Text("no problems found", style="green")
    )
    return Group(*parts, verdict)  # type: ignore[arg-type]  # all parts are renderable
