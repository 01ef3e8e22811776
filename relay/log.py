"""Structured logs: one line per event, `event key=value ...`."""

import logging
import sys
from typing import Any

FORMAT = "%(asctime)s %(levelname).1s %(processName)s %(name)s %(message)s"


def event(logger: logging.Logger, name: str, level: int = logging.INFO, /, **fields: Any) -> None:
    """Log one event; fields that are None are left out."""
    if not logger.isEnabledFor(level):
        return
    shown = " ".join(f"{key}={_show(value)}" for key, value in fields.items() if value is not None)
    logger.log(level, "%s %s", name, shown)


def configure(level: str) -> None:
    """Send this process's logs to stderr."""
    logging.basicConfig(stream=sys.stderr, format=FORMAT, level=level, force=True)


def _show(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return repr(text) if " " in text or "\n" in text else text
