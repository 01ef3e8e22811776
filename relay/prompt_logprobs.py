"""How likely a model found a prompt."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class PromptLogprobs(NamedTuple):
    """Of each prompt token but the first, given those before it.

    `ids` int32 and `logprobs` float32 [n, 1 + k]: the token itself, then the k most likely ones in order (it
    may be among them again). `ranks` int32 [n] of the token itself; 1 is the most likely.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]

    @classmethod
    def join(cls, parts: list["PromptLogprobs"]) -> "PromptLogprobs":
        """Of a prompt that was computed in chunks."""
        ids, logprobs, ranks = zip(*parts)
        return cls(np.concatenate(ids), np.concatenate(logprobs), np.concatenate(ranks))

    @classmethod
    def empty(cls) -> "PromptLogprobs":
        """Of a prompt of one token."""
        none = np.zeros((0, 1), np.int32)
        return cls(none, none.astype(np.float32), none[:, 0])

    def pairs(self) -> list[list[list[float]]]:
        """`[[token id, logprob], ...]` of each token, itself first: the form of an output token's."""
        tokens = zip(self.ids.tolist(), self.logprobs.tolist(), strict=True)
        return [[[i, value] for i, value in zip(*token, strict=True)] for token in tokens]

    @staticmethod
    def packed_bytes(prompt_tokens: int, alternatives: int) -> int:
        """Of a prompt's, once they are packed."""
        return 8 + (prompt_tokens - 1) * (8 * (1 + alternatives) + 4)

    def pack(self) -> bytes:
        head = np.array(self.ids.shape, "<i4")
        parts = (head, self.ids.astype("<i4"), self.logprobs.astype("<f4"), self.ranks.astype("<i4"))
        return b"".join(part.tobytes() for part in parts)

    @classmethod
    def unpack(cls, packed: bytes) -> "PromptLogprobs":
        rows, columns = np.frombuffer(packed, "<i4", 2).tolist()
        values = rows * columns
        ids = np.frombuffer(packed, "<i4", values, 8).reshape(rows, columns)
        logprobs = np.frombuffer(packed, "<f4", values, 8 + 4 * values).reshape(rows, columns)
        return cls(ids, logprobs, np.frombuffer(packed, "<i4", rows, 8 + 8 * values))
