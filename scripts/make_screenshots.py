"""Draw the terminal pictures of the README and the docs: `make screenshots`.

With `--dashboard` it draws only the pictures of the dashboard, docs/assets/dashboard-*.png, which takes two minutes and
needs Chromium and Playwright: `make screenshots ARGS=--dashboard`.

It runs the real demo and some commands on the demo's data in a pseudo-terminal and saves what they print as SVG.
With `--report` it also saves the demo's report as docs/assets/report.png, which needs Java and Chromium:
`make screenshots ARGS=--report`.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Literal

from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs" / "assets"
COLUMNS, ROWS = 100, 29
#: The time of the demo's day to show: payments have failed, photos are being processed, delayed jobs are waiting.
MOMENT = "15:30"

#: Between two pictures of a live view, rich moves the cursor up and erases line after line.
_REDRAW = re.compile(r"(?:\r?\x1b\[2K)?(?:\x1b\[1A\x1b\[2K)+")
_CONTROL = re.compile(r"\x1b\[\?\d+[hl]|\r")
_CLOCK = re.compile(r"tampu demo.*?(\d\d:\d\d)", re.DOTALL)
_SGR = re.compile(r"\x1b\[[\d;]*m")

#: Like rich's own format, but without a web font: the picture makes no request.
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }}
.{unique_id}-title {{ font: 600 16px system-ui, sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def run(arguments: list[str], environment: dict[str, str]) -> str:
    """Run a `tampu` command in a pseudo-terminal and return what it printed to stdout."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "tampu.cli", *arguments],
        stdin=follower,
        stdout=follower,
        stderr=subprocess.DEVNULL,  # progress bars
        env=os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"} | environment,
        start_new_session=True,
    )
    os.close(follower)
    printed = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # Linux: the other end is closed
            piece = b""
        if not piece:
            break
        printed += piece
    os.close(leader)
    if process.wait():
        raise SystemExit(f"tampu {' '.join(arguments)} exited with code {process.returncode}:\n{printed.decode()}")
    return printed.decode().replace(f"{ROOT}/", "")


def save(name: str, printed: str, title: str) -> None:
    """Save what a terminal shows as SVG."""
    lines = _CONTROL.sub("", printed).strip("\n").split("\n")
    width = min(max(len(_SGR.sub("", line)) for line in lines), COLUMNS)
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=width, file=nowhere, force_terminal=True, color_system="truecolor")
        for line in AnsiDecoder().decode("\n".join(lines)):
            console.print(line if line.plain else Text(" "), soft_wrap=False, overflow="crop", no_wrap=True)
        svg = console.export_svg(title=title, code_format=SVG, unique_id=name)
    path = ASSETS / f"{name}.svg"
    path.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} KB")


def frame_at(moment: str, printed: str) -> str:
    """Return the first picture of the live view at or after a time of the demo's day."""
    for frame in _REDRAW.split(printed):
        clock = _CLOCK.search(_SGR.sub("", frame))
        if clock and clock[1] >= moment:
            return frame
    raise SystemExit(f"the demo showed no picture at {moment}")


def save_report(report: Path) -> None:
    """Save the top of the report as it looks in a browser."""
    report.write_text(report.read_text().replace(str(report.parent), "."))  # not the path of a temporary folder
    picture = ASSETS / "report.png"
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,1100"]
    subprocess.run(["chromium", *options, f"--screenshot={picture}", report.as_uri()], check=True, capture_output=True)
    print(f"{picture.name}: {picture.stat().st_size / 1024:.0f} KB")


#: The pictures of the dashboard: the page, its width, and the scheme of its colours.
PAGES: dict[str, tuple[str, int, Literal["light", "dark"]]] = {
    "dashboard-queues": ("", 1200, "light"),
    "dashboard-dead-letters": ("dead", 1200, "light"),
    "dashboard-job": ("jobs?q=payments&state=dead", 1200, "dark"),
    "dashboard-phone": ("queue?q=payments", 400, "light"),
}
#: How long workers count before the pictures are taken, in seconds: two minutes of charts.
COUNTING_SECS = 150


def save_dashboard() -> None:
    """Serve the dashboard of a shop whose workers run, and save its pages as they look in a browser."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder:
        url = f"embedded://{folder}"
        # By a relative path: tracebacks are in the pictures.
        run_shop = "import runpy; runpy.run_path('scripts/busy_shop.py', run_name='__main__')"
        shop = subprocess.Popen([sys.executable, "-c", run_shop, url], cwd=ROOT, stderr=subprocess.DEVNULL)
        serve = [sys.executable, "-m", "tampu.cli", "dashboard", "--port", "0", "--allow-actions", "--url", url]
        time.sleep(COUNTING_SECS)
        served = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
        try:
            address = (served.stdout or sys.stdin).readline().split()[1]
            with sync_playwright() as started:
                browser = started.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
                for name, (path, width, scheme) in PAGES.items():
                    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
                    page.goto(address)
                    page.goto(address.partition("?")[0] + path)
                    if name == "dashboard-job":
                        page.locator("#rows th a").first.click()
                    page.wait_for_timeout(500)
                    picture = ASSETS / f"{name}.png"
                    page.screenshot(path=picture, clip={"x": 0, "y": 0, "width": width, "height": 900})
                    print(f"{picture.name}: {picture.stat().st_size / 1024:.0f} KB")
                browser.close()
        finally:
            for process in (served, shop):
                process.terminate()
                process.wait()


def main(arguments: list[str]) -> None:
    ASSETS.mkdir(exist_ok=True)
    if "--dashboard" in arguments:
        save_dashboard()
        return
    has_report = "--report" in arguments
    with tempfile.TemporaryDirectory() as cache:
        printed = run(["demo", "--spark" if has_report else "--no-spark"], {"TAMPU_CACHE": cache})
        if has_report:
            save_report(Path(cache) / "demo" / "report.html")
        save("demo", frame_at(MOMENT, printed), "tampu demo")
        summary = _REDRAW.split(printed)[-1]
        plain = _SGR.sub("", summary)
        lost = plain[: plain.index(" lost.")].count("\n") + 1
        save("demo-summary", "\n".join(summary.strip("\r\n").split("\n")[:lost]), "tampu demo")
        environment = {"TAMPU_URL": f"embedded://{cache}/demo"}
        [story] = re.findall(r"tampu (job why \w+)", plain)
        for name, command in (("inspect", "inspect"), ("dlq-peek", "dlq peek images --full"), ("job-why", story)):
            save(name, run(shlex.split(command), environment), f"tampu {command}")


if __name__ == "__main__":
    main(sys.argv[1:])
