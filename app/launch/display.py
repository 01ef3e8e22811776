"""Progress on a terminal: one line that changes in place, or plain lines where there is no terminal."""

import os
import shutil
import sys
import time
from typing import TextIO

_SPIN = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_CLEAR = "\r\x1b[2K"


class Display:
    """`step` says what happens now, `line` what stays on the screen."""

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self._out = out
        self._live = out.isatty() and os.environ.get("TERM") != "dumb"
        self._started = time.monotonic()
        self._step = ""
        self._turn = 0

    def step(self, text: str) -> None:
        """Show `text` until the next step or line; may be called often."""
        if self._live:
            self._turn += 1
            seconds = time.monotonic() - self._started
            shown = f"{_SPIN[self._turn % len(_SPIN)]} {seconds:.0f} s  {text}"
            self._write(_CLEAR + shown[: shutil.get_terminal_size().columns - 1])
        elif text != self._step:
            self._write(f"{text}\n")
        self._step = text

    def line(self, text: str = "") -> None:
        self._write(f"{_CLEAR if self._live else ''}{text}\n")

    def clear(self) -> None:
        """Take the last step off the screen."""
        if self._live:
            self._write(_CLEAR)

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
