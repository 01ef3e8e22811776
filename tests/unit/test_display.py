"""What is shown where there is a terminal, and where there is none."""

import io

from app.launch.display import Display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_each_step_is_a_line_said_once() -> None:
    out = io.StringIO()
    display = Display(out)
    for text in ("loading", "loading", "ready"):
        display.step(text)
    display.line("done")
    assert out.getvalue() == "loading\nready\ndone\n"


def test_a_terminal_shows_one_line_that_changes_and_fits() -> None:
    out = Terminal()
    display = Display(out)
    display.step("x" * 500)
    display.step("loading")
    display.line("done")
    first, second, last = out.getvalue().split("\r\x1b[2K")[1:]
    assert len(first) < 80
    assert second.endswith("loading")
    assert last == "done\n"
