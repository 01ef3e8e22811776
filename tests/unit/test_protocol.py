"""Versions that misunderstand each other must differ in their number: here it stands beside what is said."""

import hashlib
import re
from importlib.resources import files

from relay import mailbox, worker_card
from relay.geometry import Geometry
from relay.protocol import PROTOCOL, READS_SINCE

SAID = (5, "c2d2dbe180ae")


def said() -> str:
    """What functions take and answer, as the comments above them tell, what they mail, what cards hold."""
    parts = []
    for source in ("rooms.lua", "batches.lua"):
        code = files("relay").joinpath(source).read_text()
        above = re.findall(r"((?:^--[^\n]*\n)+)local function (\w+)\(keys", code, re.MULTILINE)
        assert len(above) >= 19
        parts += [f"{name}: {text}" for text, name in above if name != "enter"]
        parts += re.findall(r"mail\(c, .*?\)\n", code)
        parts += re.findall(r"^local (?:MILESTONE|LOOKED_AT) = \{.*?\}", code, re.MULTILINE | re.DOTALL)
        parts += re.findall(r"^  return \{ r\.id.*?\}", code, re.MULTILINE | re.DOTALL)  # of claimed()
    shapes = (worker_card.Incarnation, worker_card.Load, worker_card.WorkerCard, Geometry)
    mails = (mailbox.Published, mailbox.Ready, mailbox.Ended, mailbox.Ask, mailbox.Settled)
    parts += [f"{shape.__name__}{shape._fields}" for shape in (*shapes, *mails)]
    return "\n".join(parts)


def test_what_is_said_has_its_number() -> None:
    found = PROTOCOL, hashlib.sha256(said().encode()).hexdigest()[:12]
    assert found == SAID, (
        f"What processes say to each other by way of Redis is not what it was. If a version from before would"
        f" misunderstand it, or be misunderstood, add one to PROTOCOL in relay/protocol.py, and think of"
        f" READS_SINCE. If only words changed, leave the number. Then let SAID be {found}."
    )
    assert 1 <= READS_SINCE <= PROTOCOL
