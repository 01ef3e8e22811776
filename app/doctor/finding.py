"""What a check found."""

from typing import Literal, NamedTuple

Level = Literal["ok", "warn", "fail"]


class Finding(NamedTuple):
    """`warn`: it runs, but not as well or as safely as it could. `fail`: it cannot. `todo`: what to do."""

    level: Level
    subject: str
    what: str
    todo: str = ""


def ok(subject: str, what: str) -> Finding:
    return Finding("ok", subject, what)


def warn(subject: str, what: str, todo: str) -> Finding:
    return Finding("warn", subject, what, todo)


def fail(subject: str, what: str, todo: str) -> Finding:
    return Finding("fail", subject, what, todo)
