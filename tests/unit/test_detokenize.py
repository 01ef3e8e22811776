"""Text that is certain, over the default model's own vocabulary and one with a byte fallback."""

import functools
import random

import pytest
import tokenizers
from tokenizers import decoders, models

from relay.model_file import default_model_path
from relay.sampling import SamplingParams
from relay.tokenizer import Tokenizer
from workers.detokenize import Detokenizer, Piece

TEXTS = (
    "Hello world! It's 3.14 o'clock.\n\n\tdef f(x):\n        return x ** 2\n",
    "Zażółć gęślą jaźń – naïve café, Москва, 東京都は日本の首都です。",
    "Emoji: 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 and 𝔘𝔫𝔦𝔠𝔬𝔡𝔢, \ufffd stays",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(default_model_path())


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As SentencePiece models have it: `▁` for a space, and a token for each byte."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁", "a", "b"]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return Tokenizer(backend, special_tokens={}, eos_ids=(), chat_template=None)


def params(**given) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 100} | given))


def run(detokenizer: Detokenizer, ids) -> tuple[list[str], str | None]:
    """Texts per token up to the stop, the last with what was held back; and the stop."""
    texts = []
    for token in ids:
        piece = detokenizer.push(token)
        texts.append(piece.text)
        if piece.stop is not None:
            return texts, piece.stop
    return [*texts, detokenizer.flush()], None


def whole(tokenizer, ids, **given) -> tuple[str, str | None]:
    texts, stop = run(Detokenizer(tokenizer, (), params(**given)), ids)
    return "".join(texts), stop


@functools.cache
def ids_of_bytes(tokenizer) -> dict[bytes, int]:
    return {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}


def byte_ids(tokenizer, data: bytes) -> list[int]:
    """One token per byte."""
    return [ids_of_bytes(tokenizer)[bytes([byte])] for byte in data]


def expected_stop(text: str, stops, include: bool) -> tuple[str, str | None]:
    """By hand: grow the text by one character until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_whole(tokenizer, text):
    for ids in (tokenizer.encode(text), byte_ids(tokenizer, text.encode())):
        assert whole(tokenizer, ids) == (text, None)


def test_any_tokens_read_as_the_tokenizer_decodes_them(tokenizer):
    dice = random.Random(0)
    for _ in range(200):
        ids = dice.choices(range(tokenizer.vocab_size), k=40)
        assert whole(tokenizer, ids)[0] == tokenizer.decode(ids)
        assert whole(tokenizer, ids, skip_special_tokens=False)[0] == tokenizer.decode(
            ids, skip_special_tokens=False
        )


def test_any_bytes_read_as_utf8(tokenizer):
    dice = random.Random(1)
    for _ in range(200):
        data = bytes(dice.choices([0x20, 0x41, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80], k=30))
        assert whole(tokenizer, byte_ids(tokenizer, data))[0] == data.decode("utf-8", "replace")


def test_a_character_is_published_when_it_is_whole(tokenizer):
    texts, _ = run(Detokenizer(tokenizer, (), params()), byte_ids(tokenizer, "é😀".encode()))
    assert texts == ["", "é", "", "", "", "😀", ""]


def test_an_unfinished_character_is_released_at_the_end(tokenizer):
    texts, _ = run(Detokenizer(tokenizer, (), params()), byte_ids(tokenizer, "a😀".encode()[:-1]))
    assert texts == ["a", "", "", "", "\ufffd"]


def test_the_output_completes_a_character_of_the_prompt(tokenizer):
    ids = byte_ids(tokenizer, "x😀y".encode())
    for cut in range(1, 5):
        texts, _ = run(Detokenizer(tokenizer, ids[:cut], params()), ids[cut:])
        assert "".join(texts) == "😀y"
    assert "".join(run(Detokenizer(tokenizer, ids[:5], params()), ids[5:])[0]) == "y"


def test_byte_fallback(byte_fallback):
    hello, space, a, b = range(257, 261)
    ids = [hello, *(1 + byte for byte in "你好".encode()), space, a, 1 + 0xE4, b]
    texts, _ = run(Detokenizer(byte_fallback, (), params()), ids)
    assert texts == [" Hello", "", "", "你", "", "", "好", " ", "a", "", "\ufffdb", ""]


def test_special_tokens(tokenizer):
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert whole(tokenizer, ids) == ("user\nhi", None)
    assert whole(tokenizer, ids, skip_special_tokens=False) == ("<|im_start|>user\nhi<|im_end|>", None)
    assert whole(tokenizer, ids, stop=("<|im_end|>",)) == ("user\nhi", None)


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_wherever_the_tokens_end(tokenizer, include):
    dice = random.Random(2)
    stopped = 0
    for _ in range(400):
        text = "".join(dice.choices("abcé", k=24))
        stops = tuple(
            {"".join(dice.choices("abcé", k=dice.randint(1, 5))) for _ in range(dice.randint(1, 3))}
        )
        expected = expected_stop(text, stops, include)
        for ids in (tokenizer.encode(text), byte_ids(tokenizer, text.encode())):
            assert whole(tokenizer, ids, stop=stops, include_stop_str_in_output=include) == expected
        stopped += expected[1] is not None
    assert 100 < stopped < 400


def test_nothing_is_published_that_may_begin_a_stop_string(tokenizer):
    dice = random.Random(3)
    for _ in range(200):
        stop = "".join(dice.choices("ab", k=dice.randint(2, 5)))
        text = "".join(dice.choices("ab", k=20))
        detokenizer = Detokenizer(tokenizer, (), params(stop=(stop,)))
        published, seen = "", ""
        for token in byte_ids(tokenizer, text.encode()):
            piece = detokenizer.push(token)
            published, seen = published + piece.text, seen + tokenizer.decode([token])
            if piece.stop is not None:
                break
            held = seen.removeprefix(published)
            assert published + held == seen
            assert held == max((stop[:k] for k in range(len(stop)) if seen.endswith(stop[:k])), key=len)


def test_held_text_is_released_when_the_end_is_another(tokenizer):
    detokenizer = Detokenizer(tokenizer, (), params(stop=("END",)))
    texts, stop = run(detokenizer, byte_ids(tokenizer, b"the EN"))
    assert (texts[-1], stop) == ("EN", None)
    assert detokenizer.flush() == ""


def test_stop_strings_do_not_count_within_min_tokens(tokenizer):
    ids = byte_ids(tokenizer, b"xabyabzab")
    for min_tokens, expected in (
        (0, "x"),
        (2, "x"),
        (3, "xaby"),
        (5, "xaby"),
        (6, "xabyabz"),
        (9, "xabyabzab"),
    ):
        text, stop = whole(tokenizer, ids, stop=("ab",), min_tokens=min_tokens)
        assert text == expected
        assert stop == (None if min_tokens == 9 else "ab")


def test_a_stop_string_that_did_not_count_is_text(tokenizer):
    """Neither held back as if it could still match, nor found again inside what is held for a longer one."""
    early = Detokenizer(tokenizer, (), params(stop=("ab", "zzzz"), min_tokens=2))
    assert [early.push(token) for token in byte_ids(tokenizer, b"ab")] == [Piece(""), Piece("ab")]
    longer = Detokenizer(tokenizer, (), params(stop=("ab", "xaby!"), min_tokens=3))
    pieces = [longer.push(token) for token in byte_ids(tokenizer, b"xaby?")]
    assert pieces == [Piece("")] * 4 + [Piece("xaby?")]


def test_rebuilt_from_the_stream_it_goes_on_the_same(tokenizer):
    """What the first worker published and what the second adds is what one worker alone would say."""
    dice = random.Random(4)
    common = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) < 3]
    for _ in range(100):
        ids = dice.choices(common, k=30)
        text = tokenizer.decode(ids)
        at = dice.randrange(max(1, len(text) - 3))
        given = params(stop=(text[at : at + 3],), min_tokens=dice.choice([0, 10]))
        prompt = dice.choices(common, k=5)
        alone, stop = run(Detokenizer(tokenizer, prompt, given), ids)
        for split in range(len(alone) - 1):
            rebuilt = Detokenizer(tokenizer, prompt, given)
            replayed = [rebuilt.push(token) for token in ids[:split]]
            assert replayed == [Piece(text) for text in alone[:split]]
            assert run(rebuilt, ids[split:]) == (alone[split:], stop)
