"""Draw docs/assets/life-of-a-job.svg, the diagram of docs/architecture.md: `make diagram`.

The boxes and arrows are listed below; a test checks that the files they name exist and that the picture is up to date.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "docs" / "assets" / "life-of-a-job.svg"
WIDTH, HEIGHT = 990, 620
BOX_WIDTH, BOX_HEIGHT = 216, 50
LEFT, MIDDLE, RIGHT = 24, 342, 750  # the left edge of each lane
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #57606a } .name { font-weight: 600; font-size: 13px; fill: #1f2328 }
.file { font: 11px ui-monospace, monospace } .lane { font-weight: 600; fill: #00796b }
.page { fill: #ffffff } .ground { fill: #f6f8fa } .box { fill: #ffffff; stroke: #8c959f } .store { fill: #e0f2f1; stroke: #00796b }
.arrow { fill: none; stroke: #57606a; stroke-width: 1.4 } .dashed { stroke-dasharray: 4 3 } .head { fill: #57606a }
@media (prefers-color-scheme: dark) {
text { fill: #9198a1 } .name { fill: #e6edf3 } .lane { fill: #4db6ac } .page { fill: #1e2129 } .ground { fill: #262a35 }
.box { fill: #1e2129; stroke: #6e7681 } .store { fill: #133b38; stroke: #4db6ac } .arrow { stroke: #9198a1 } .head { fill: #9198a1 }
}
</style>"""  # noqa: E501 - one rule per kind of element


@dataclass(frozen=True)
class Box:
    """A step of a job's life, or a place where jobs are stored."""

    x: int
    y: int
    name: str
    files: tuple[str, ...] = ()
    is_store: bool = False


@dataclass(frozen=True)
class Arrow:
    """From one box to another along a path of SVG commands, with a label."""

    path: str
    label: str = ""
    at: tuple[int, int] = (0, 0)
    is_dashed: bool = False


BOXES = (
    Box(LEFT, 56, "task.add, queue.add", ("task.py", "queue.py")),
    Box(LEFT, 136, "pack the arguments", ("produce/producer.py",)),
    Box(LEFT, 216, "collect a window", ("produce/adder.py", "produce/window.py")),
    Box(LEFT, 296, "number, send, resend", ("produce/chain.py",)),
    Box(LEFT, 416, "fire schedules", ("maintain/scheduler.py",)),
    Box(LEFT, 534, "tables and report", ("spark/read", "spark/lake")),
    Box(MIDDLE, 176, "stream", is_store=True),
    Box(MIDDLE, 296, "delayed set", is_store=True),
    Box(MIDDLE, 416, "dead letters", is_store=True),
    Box(MIDDLE, 534, "results and events", is_store=True),
    Box(RIGHT, 56, "read", ("consume/reader.py",)),
    Box(RIGHT, 136, "hold in flight", ("consume/inflight.py",)),
    Box(RIGHT, 216, "run", ("consume/pool.py", "consume/admission.py")),
    Box(RIGHT, 296, "call your handler", ("consume/execute.py",)),
    Box(RIGHT, 376, "decide the outcome", ("consume/outcomes.py",)),
    Box(RIGHT, 456, "settle", ("consume/settle.py",)),
    Box(RIGHT, 544, "renew leases", ("consume/leases.py",)),
)
ARROWS = (
    *(Arrow(f"M132 {y} V{y + 30}") for y in (106, 186, 266)),
    *(Arrow(f"M858 {y} V{y + 30}") for y in (106, 186, 266, 346, 426)),
    Arrow("M240 321 H282 V192 H342", "add_window.lua", (246, 180)),
    Arrow("M240 441 H300 V206 H342"),
    Arrow("M558 201 H646 V81 H750", "XREADGROUP", (654, 72)),
    Arrow("M450 296 V226", "promote: maintain/promoter.py", (458, 265)),
    Arrow("M392 416 V372 H318 V220 H342", "replay: inspect/admin.py", (400, 390)),
    Arrow("M750 470 H692 V321 H558", "retry", (600, 314)),
    Arrow("M750 481 H676 V441 H558", "no attempt left", (572, 434)),
    Arrow("M750 492 H692 V559 H558", "success", (590, 552)),
    Arrow("M342 559 H240"),
    Arrow("M342 450 H318 V548 H240"),
    Arrow("M750 569 H716 V161 H750", is_dashed=True),
)
#: The left edge, top and height of each lane.
LANES = (
    (LEFT, 14, 346, "producer process"),
    (LEFT, 374, 106, "leader: one of the workers"),
    (LEFT, 494, 114, "Spark"),
    (MIDDLE, 14, 594, "Redis or Valkey"),
    (RIGHT, 14, 594, "worker process"),
)


def picture() -> str:
    """Return the diagram as SVG."""
    lanes = "".join(
        f'<rect class="ground" x="{x - 12}" y="{y}" width="{BOX_WIDTH + 24}" height="{height}" rx="8"/>'
        f'<text class="lane" x="{x}" y="{y + 24}">{name}</text>'
        for x, y, height, name in LANES
    )
    arrows = "".join(_arrow(arrow) for arrow in ARROWS)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'aria-label="The life of a job">{STYLE}<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" '
        'markerWidth="7" markerHeight="7" orient="auto"><path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>'
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>\n{lanes}\n'
        + "\n".join(_box(box) for box in BOXES)
        + f"\n{arrows}</svg>\n"
    )


def _arrow(arrow: Arrow) -> str:
    dashed = " dashed" if arrow.is_dashed else ""
    line = f'<path class="arrow{dashed}" d="{arrow.path}" marker-end="url(#head)"/>'
    x, y = arrow.at
    return line + (f'<text class="file" x="{x}" y="{y}">{escape(arrow.label)}</text>' if arrow.label else "")


def _box(box: Box) -> str:
    lines = [f'<text class="name" x="{box.x + 12}" y="{box.y + (21 if box.files else 30)}">{escape(box.name)}</text>']
    if box.files:
        short = [box.files[0], *(path.rsplit("/", 1)[-1] for path in box.files[1:])]
        lines.append(f'<text class="file" x="{box.x + 12}" y="{box.y + 39}">{escape(", ".join(short))}</text>')
    kind, rounding = ("store", 24) if box.is_store else ("box", 6)
    frame = f'<rect class="{kind}" x="{box.x}" y="{box.y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="{rounding}"/>'
    return frame + "".join(lines)


if __name__ == "__main__":
    PICTURE.write_text(picture())
