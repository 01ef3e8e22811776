"""Token ids to text that is certain: whole characters, nothing that may yet begin a stop string."""

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from relay.sampling import SamplingParams
from relay.tokenizer import Tokenizer

_LONGEST_UNFINISHED = 3  # tokens: at most 3 of the up to 4 bytes of a character wait for the rest


class Piece(NamedTuple):
    """The text that became certain with a token. It is the last if the token completed `stop`."""

    text: str
    stop: str | None = None


class Detokenizer:
    """A function of the stream: fed the same prompt and tokens again, on any worker, it is in the same state.

    The text is the bytes of the tokens, read as UTF-8 one after the other, so a token costs its own length,
    not the stream's. Bytes that are no character become U+FFFD as soon as that is certain.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset[int]()
        self._stops = params.stop
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._tokens = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # the longest end of the text so far that begins a stop string
        for token in prompt_ids[-_LONGEST_UNFINISHED:]:  # the output may complete the prompt's last character
            self._utf8.decode(self._bytes(token))

    def push(self, token_id: int) -> Piece:
        """The next token. Nothing may be pushed after a piece with `stop`.

        Of several stop strings the one that ends first wins, of those the longest, wherever tokens begin. As
        with stop tokens, none counts that ends within the first `min_tokens` tokens.
        """
        text = self._held + self._utf8.decode(self._bytes(token_id))
        match = None if self._tokens < self._min_tokens else self._first_stop(text, len(self._held))
        self._tokens += 1
        if match is not None:
            start, stop = match
            self._held = ""
            return Piece(text[: start + len(stop) if self._include_stop else start], stop)
        certain = len(text) - self._beginning(text)
        self._held = text[certain:]
        return Piece(text[:certain])

    def flush(self) -> str:
        """The text held back, when the stream has ended in another way than by a stop string."""
        text = self._held + self._utf8.decode(b"", final=True)
        self._held = ""
        return text

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)

    def _first_stop(self, text: str, old: int) -> tuple[int, str] | None:
        """Start and stop string of the first match that ends beyond the first `old` characters."""
        found = [(text.find(stop, max(0, old - len(stop) + 1)), stop) for stop in self._stops]
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string, but not a whole one."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(len(stop) > length and stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
