"""In a real terminal: live views, prompts, Ctrl-C, and the state of the terminal afterwards."""

from __future__ import annotations

import signal

from cli.lab import Terminal, invoke
from cli.shop import QUEUE, Filled


def test_ctrl_c_ends_a_live_view_and_restores_the_screen(shop: Filled) -> None:
    for command in (("watch", QUEUE), ("top",)):
        with Terminal(*command, "--interval", "0.1") as terminal:
            terminal.until("Ctrl-C to exit")
            terminal.until(QUEUE)
            terminal.press("\x03")
            assert terminal.wait() == 0
            assert "\x1b[?1049h" in terminal.shown  # to the alternate screen
            assert terminal.shown.rindex("\x1b[?1049l") > terminal.shown.rindex("\x1b[?1049h")  # and back
            assert terminal.shown.rindex("\x1b[?25h") > terminal.shown.rindex("\x1b[?25l")  # the cursor too
            assert "Traceback" not in terminal.shown


def test_sigterm_ends_a_live_view_and_restores_the_screen(shop: Filled) -> None:
    with Terminal("top") as terminal:
        terminal.until("Ctrl-C to exit")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.wait() == 143
        assert terminal.shown.rindex("\x1b[?1049l") > terminal.shown.rindex("\x1b[?1049h")


def test_a_destructive_command_asks_for_confirmation(shop: Filled) -> None:
    with Terminal("dlq", "remove", QUEUE) as terminal:
        terminal.until("delete 2 dead letters of shop permanently? [y/N]")
        terminal.press("n\n")
        assert terminal.wait() == 0
        assert "nothing was changed" in terminal.shown
    assert len(invoke("dlq", "peek", QUEUE, "--json").json) == 2
    with Terminal("dlq", "remove", QUEUE) as terminal:
        terminal.until("[y/N]")
        terminal.press("y\n")
        assert terminal.wait() == 0
        terminal.until("removed 2 dead letters")
    assert invoke("dlq", "peek", QUEUE, "--json").json == []


def test_ctrl_c_at_a_prompt_changes_nothing(shop: Filled) -> None:
    with Terminal("queue", "purge", QUEUE) as terminal:
        terminal.until("[y/N]")
        terminal.press("\x03")
        assert terminal.wait() == 130
        assert terminal.shown.rstrip().endswith("tampu: interrupted")
    assert invoke("inspect", QUEUE, "--json").json["waiting"] == 1


def test_tables_are_coloured_and_fit_the_terminal(shop: Filled) -> None:
    with Terminal("inspect") as terminal:
        assert terminal.wait() == 0
        assert "\x1b[1mshop" in terminal.shown
        assert QUEUE in terminal.shown


def test_an_error_in_a_terminal_is_one_line() -> None:
    with Terminal("inspect", "--url", "redis://127.0.0.1:9", "--timeout", "0.1") as terminal:
        assert terminal.wait() == 1
        [line] = terminal.shown.splitlines()
        assert line.startswith("tampu: no connection to 127.0.0.1:9")
