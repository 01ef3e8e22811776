"""The metadata row and the agent metadata: whole, or nothing."""

import random

import pytest

from relay.geometry import Geometry, GeometryMismatch
from workers.engine.messages import Sampled
from workers.transfer.base import RowsExhausted, Seal
from workers.transfer.memory import KVMemory
from workers.transfer.metadata import MAX_LOGPROBS, POISON, ROW, ROW_BYTES, pack, unpack
from workers.transfer.peer import Peer
from workers.transfer.rows import Rows

SEAL = Seal(
    room=2**63 - 1,
    attempt=3,
    nonce=2**62 + 5,
    position=7,
    tokens=4000,
    pages=250,
    first=Sampled(49151, [[49151, -0.5], [12, -1.25]]),
    cached_tokens=32,
    digest=(1 << 32) | 0xFFFFFFFF,
)


@pytest.mark.parametrize(
    "logprobs", [None, [], [[5, -0.5]], [[i, -float("inf") if i else -i / 4] for i in range(MAX_LOGPROBS)]]
)
def test_a_row_holds_its_seal(logprobs: list[list[float]] | None) -> None:
    seal = SEAL._replace(first=Sampled(5, logprobs))
    assert len(pack(seal)) == ROW_BYTES >= ROW.itemsize
    assert unpack(pack(seal)) == seal


def test_too_many_logprobs_are_refused() -> None:
    with pytest.raises(AssertionError):
        pack(SEAL._replace(first=Sampled(5, [[1, 0.0]] * (MAX_LOGPROBS + 1))))


def test_poison_and_zeros_are_no_seal() -> None:
    assert unpack(POISON) is None
    assert unpack(bytes(ROW_BYTES)) is None


def test_a_row_torn_anywhere_is_no_seal() -> None:
    whole = pack(SEAL)
    other = pack(SEAL._replace(room=1, tokens=17, pages=2, first=Sampled(3, None), nonce=9, position=0))
    checked = ROW.fields["checksum"][1]  # type: ignore[index]
    for cut in range(1, checked + 3):
        for before in (POISON, other):
            for torn in (whole[:cut] + before[cut:], before[:cut] + whole[cut:]):
                if torn[: checked + 4] not in (whole[: checked + 4], before[: checked + 4]):
                    assert unpack(torn) is None


def test_a_flipped_bit_is_no_seal() -> None:
    rng = random.Random(2)
    checked = ROW.fields["checksum"][1] + 4  # type: ignore[index]
    for _ in range(300):
        data = bytearray(pack(SEAL))
        data[rng.randrange(checked)] ^= 1 << rng.randrange(8)
        assert unpack(bytes(data)) is None


def test_rows_are_taken_poisoned_and_run_out() -> None:
    rows = Rows(2)
    first = rows.take()
    rows.write(first, pack(SEAL))
    assert unpack(rows.read(first)) == SEAL
    assert rows.take() != first
    with pytest.raises(RowsExhausted):
        rows.take()
    rows.give_back(first)
    assert rows.take() == first
    assert rows.read(first) == POISON
    rows.give_back(first)
    with pytest.raises(AssertionError):
        rows.give_back(first)


def test_agent_metadata_is_read_back_or_refused() -> None:
    memory = KVMemory(Geometry("m", "float32", 2, 1, 4, 4, pages=9), address=4096)
    peer = Peer.here("boot", memory, Rows(3), "loopback", b"\x00contact\xff")
    assert Peer.unpack(peer.pack()) == peer
    assert (peer.pages, peer.rows, peer.pool_address) == (9, 3, 4096)
    bad = [b"", b"KVR1", b"KVR2" + peer.pack()[4:], peer.pack()[:20], peer._replace(row_version=2).pack()]
    for data in bad:
        with pytest.raises(GeometryMismatch, match="one version of kvrelay"):
            Peer.unpack(data)
