"""What the processes of one model say to each other by way of Redis has a number. Two numbers never meet: a
process that starts agrees first, and every function in Redis refuses a caller of another number."""

from contextlib import suppress
from importlib.resources import files
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from relay.redis_client import probe_client

# One more whenever arguments or answers of functions, mail, cards or records change so that one version would
# misunderstand the other: tests/unit/test_protocol.py watches.
PROTOCOL = 5
READS_SINCE = 1  # the oldest number whose open requests and batches this version goes on with

OTHER_PROTOCOL = "OTHER_PROTOCOL"  # what functions say to a caller that has to agree (again)
_PATIENCE_S = 4.0
_ADVICE = "docs/operations.md, Upgrades, has the way."


class ProtocolMismatch(ValueError):
    """Another version of kvrelay serves this model in this Redis, by protocol `found`."""

    def __init__(self, message: str, found: int) -> None:
        super().__init__(message)
        self.found = found


class Protocol:
    """Of one process and the model whose keys begin with `root`. Thread-safe. Methods raise ProtocolMismatch,
    and what redis-py raises."""

    def __init__(self, redis: Redis, root: str) -> None:
        self.number = PROTOCOL
        self._redis = redis
        self._root = root
        self._script = files("relay").joinpath("protocol.lua").read_text()
        self._agreed = False

    def agree(self) -> None:
        """Once this process has begun it takes no model back from a version that came later."""
        self._ask("run" if self._agreed else "start")
        self._agreed = True

    def look(self) -> int:
        """What would be agreed on now, which nothing follows from: the number found."""
        return self._ask("look")

    def _ask(self, how: str) -> int:
        reply: Any = self._redis.eval(self._script, 1, self._root, self.number, READS_SINCE, how)
        against, found, many = reply[0].decode(), int(reply[1]), int(reply[2])
        if against:
            told = _TOLD[against].format(root=self._root, found=found, own=self.number, many=many)
            raise ProtocolMismatch(f"{told} {_ADVICE}", found)
        return found


_TOLD = {
    "workers": "Another version of kvrelay serves here: {many} living workers under {root} speak protocol"
    " {found}, this process speaks {own}. Stop them first (one that was killed counts for ten seconds more),"
    " or start that version.",
    "newcomer": "Another version of kvrelay has taken over {root}: it speaks protocol {found}, this process"
    " {own}. Stop this process and start that version in its place.",
    "open": "{root} has {many} open requests and batches of another version of kvrelay, which speaks protocol"
    " {found}; this process speaks {own} and cannot go on with them. Let that version end them, or choose"
    " another SERVED_NAME.",
}


def check_protocol(url: str, root: str) -> None:
    """At once, before anything is loaded; a server that is away is asked by the first call. Raises
    ProtocolMismatch."""
    with suppress(RedisError), probe_client(url, _PATIENCE_S) as client:
        Protocol(client, root).agree()
