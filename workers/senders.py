"""Where the engine thread finds the sender of a leg whose layers it has just computed."""

from workers.engine.messages import Admitted, Computed
from workers.transfer.base import KVManager, KVSender


class Senders:
    """Control announces a leg (`expect`), the engine thread opens its sender at admission, so that no layer
    group is computed before somebody can send it. Of each entry one thread is the writer."""

    def __init__(self, manager: KVManager, layers: int, page_size: int) -> None:
        self._manager = manager
        self._layers = layers
        self._page_size = page_size
        self._rooms: dict[str, int] = {}
        self._open: dict[str, KVSender] = {}

    def expect(self, key: str, room: int) -> None:
        self._rooms[key] = room

    def admitted(self, event: Admitted) -> None:
        """On the engine thread, before the first chunk. The cached prefix is there to be sent at once."""
        room = self._rooms.get(event.key)
        if room is None:  # control gave the leg up a moment ago
            return
        sender = self._manager.sender(room, event.key, event.pages)
        if event.cached_tokens:
            sender.computed(Computed(event.key, 0, self._layers, 0, event.cached_tokens // self._page_size))
        self._open[event.key] = sender

    def computed(self, part: Computed) -> None:
        """On the engine thread, inside the forward pass."""
        sender = self._open.get(part.key)
        if sender is not None:
            sender.computed(part)

    def opened(self, key: str) -> KVSender:
        """On the control thread, after Admitted."""
        return self._open[key]

    def forget(self, key: str) -> None:
        """On the control thread. A sender that is still open never bootstrapped, or is settled."""
        self._rooms.pop(key, None)
        sender = self._open.pop(key, None)
        if sender is not None:
            sender.close()
