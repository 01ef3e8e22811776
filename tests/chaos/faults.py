"""Which faults happen where: a pure function of a seed."""

import json
import random
from enum import StrEnum
from typing import NamedTuple

PREFILL, DECODE = "prefill", "decode"
BOTH = (PREFILL, DECODE)


class Kind(StrEnum):
    """KILL and STOP send SIGKILL and SIGSTOP to the worker that comes by. DROP loses a message, a call, or
    its reply; DUPLICATE makes it happen three times."""

    KILL = "kill"
    STOP = "stop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    DROP = "drop"


class When(StrEnum):
    BEFORE = "before"
    AFTER = "after"


ANY = tuple(Kind)
PROCESS = (Kind.KILL, Kind.STOP, Kind.DELAY)

# Per transition: the roles that pass by there, and what can go wrong there.
TRANSITIONS: dict[str, tuple[tuple[str, ...], tuple[Kind, ...]]] = {
    "claim": (BOTH, ANY),
    "claim_forks": ((DECODE,), ANY),
    "publish": ((DECODE,), ANY),
    "kv_ready": ((PREFILL,), ANY),
    "emit": ((DECODE,), ANY),
    "finish": ((DECODE,), ANY),
    "release": (BOTH, ANY),
    "renew": (BOTH, ANY),
    "ask": ((DECODE,), ANY),
    "settle": ((PREFILL,), ANY),
    "mail.published": ((PREFILL,), ANY),
    "mail.ready": ((DECODE,), ANY),
    "mail.ended": (BOTH, ANY),
    "mail.ask": ((PREFILL,), ANY),
    "mail.settled": ((DECODE,), ANY),
    "ring.prefill": (BOTH, ANY),
    "ring.decode": ((PREFILL,), ANY),
    "admitted": (BOTH, PROCESS),  # at a decode worker: of a fork
    "prefilled": (BOTH, PROCESS),
    "reserved": ((DECODE,), PROCESS),
    "computed": ((PREFILL,), PROCESS),
    "post": ((PREFILL,), PROCESS),
    "post.row": ((PREFILL,), PROCESS),
}

# Most requests pass here, so faults drawn for a schedule will mostly happen.
COMMON = (
    *("claim", "claim_forks", "publish", "kv_ready", "emit", "finish", "renew"),
    *("mail.published", "mail.ready"),
    *("ring.decode", "admitted", "prefilled", "reserved", "computed", "post", "post.row"),
)
RARE_SHARE = 0.15
LATEST_OCCURRENCE = {"emit": 20, "computed": 12, "post": 12, "renew": 3}
USUAL_LATEST = 5


class Fault(NamedTuple):
    """Happens to the first worker of `role` that passes `transition` for the `occurrence`-th time, once."""

    number: int
    role: str
    kind: Kind
    transition: str
    when: When
    occurrence: int
    seconds: float = 0.0  # of a stop or a delay

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return (
            f"#{self.number} {self.kind} {self.role}{lasting} {self.when} {self.transition} {self.occurrence}"
        )

    def to_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> "Fault":
        number, role, kind, transition, when, occurrence, seconds = json.loads(text)
        return cls(number, role, Kind(kind), transition, When(when), occurrence, seconds)


def schedule(seed: int, count: int) -> list[Fault]:
    """The same `seed` and `count` give the same faults; a longer schedule begins with the shorter one."""
    draw = random.Random(seed)
    return [_fault(draw, number) for number in range(1, count + 1)]


def _fault(draw: random.Random, number: int) -> Fault:
    rare = draw.random() < RARE_SHARE
    transition = draw.choice(sorted(TRANSITIONS)) if rare else draw.choice(COMMON)
    roles, kinds = TRANSITIONS[transition]
    kind = draw.choice(kinds)
    seconds = {
        # Half of the stops outlast the lease.
        Kind.STOP: draw.choice((draw.uniform(0.2, 2.0), draw.uniform(4.0, 6.0))),
        Kind.DELAY: draw.uniform(0.05, 1.5),
    }
    return Fault(
        number,
        draw.choice(roles),
        kind,
        transition,
        draw.choice(tuple(When)),
        draw.randint(1, LATEST_OCCURRENCE.get(transition, USUAL_LATEST)),
        round(seconds.get(kind, 0.0), 2),
    )
