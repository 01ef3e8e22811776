"""Text to token ids and back, and conversations to prompts, without torch or transformers."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from relay.chat_template import ChatTemplate, ChatTemplateError
from relay.gguf import GGUFHead, read_gguf_head
from relay.gguf_tokenizer import build_gguf_tokenizer
from relay.model_file import ModelError, read_json, resolve_model

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_GGUF_ROLES = ("bos", "eos", "unknown", "padding")  # the same, in tokenizer.ggml.<role>_token_id
# What ends a turn in models whose GGUF file names only one end; as llama.cpp finds them, by spelling.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")
_GGUF_END_ROLES = ("eos", "eot", "eom")


class Tokenizer:
    """A model's tokenizer. Threads may share it.

    `bos_id` is None where a model has none. `eos_ids` are all ids that end a text or a turn,
    `special_ids` those that decoding may skip.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_ids: Iterable[int],
        chat_template: str | None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self._byte_of = _byte_alphabet() if "ByteLevel" in repr(backend.decoder) else None
        self._special_tokens = dict(special_tokens)
        self.chat_template = self.compile_template(chat_template) if chat_template else None
        bos = special_tokens.get("bos_token")
        self.bos_id: int | None = backend.token_to_id(bos) if bos is not None else None
        self.eos_ids = frozenset(eos_ids)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """The tokenizer of a Hugging Face directory (tokenizer.json) or GGUF file. Raises ModelError."""
        path = resolve_model(path)
        return _from_directory(path) if path.is_dir() else _from_gguf(read_gguf_head(path))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens` also the BOS that the model expects, if any.

        A prompt made by `apply_chat_template` spells its own BOS: encode it without.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no whole character become U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def compile_template(self, source: str) -> ChatTemplate:
        """A chat template that may name this model's special tokens. Raises ModelError."""
        return ChatTemplate(source, self._special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        template: ChatTemplate | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for a conversation, by the model's template or `template`, with further `variables`.

        Raises ChatTemplateError, also where there is no template.
        """
        template = template or self.chat_template
        if template is None:
            raise ChatTemplateError("this model has no chat template: send a plain prompt instead")
        return template.render(messages, add_generation_prompt=add_generation_prompt, **(variables or {}))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; empty for an id that no token has."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of is not None and all(char in self._byte_of for char in token):
            return bytes(self._byte_of[char] for char in token)
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
            return bytes.fromhex(byte[1])
        return str(token).replace("▁", " ").encode()

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def is_special(self, token: str) -> bool:
        """Whether this is how a token is spelled that decoding may skip."""
        return self.token_id(token) in self.special_ids

    def token_text(self, token_id: int) -> str:
        """One token as text; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _from_directory(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{file} is missing: save the tokenizer there with AutoTokenizer.save_pretrained")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the binding raises plain Exception
        raise ModelError(f"{file} is not a readable tokenizer ({error}): download it again") from error
    config = _read_optional_json(path / "tokenizer_config.json")
    named = {name: _content(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
    eos_ids = {backend.token_to_id(named["eos_token"])} if "eos_token" in named else set()
    for source in ("generation_config.json", "config.json"):
        declared = _read_optional_json(path / source).get("eos_token_id")
        eos_ids.update(declared if isinstance(declared, list) else [declared])
    return Tokenizer(
        backend,
        special_tokens=named,
        eos_ids={i for i in eos_ids if i is not None},
        chat_template=_directory_template(path, config.get("chat_template")),
    )


def _from_gguf(head: GGUFHead) -> Tokenizer:
    backend = build_gguf_tokenizer(head)
    ids = {
        role: head.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in _GGUF_ROLES + _GGUF_END_ROLES
    }
    tokens: list[str] = head.metadata["tokenizer.ggml.tokens"]
    named = {
        name: tokens[i]
        for name, role in zip(_SPECIAL_TOKENS, _GGUF_ROLES, strict=True)
        if (i := ids[role]) is not None
    }
    ends = [ids[role] for role in _GGUF_END_ROLES] + [backend.token_to_id(token) for token in _END_TOKENS]
    return Tokenizer(
        backend,
        special_tokens=named,
        eos_ids={i for i in ends if i is not None},
        chat_template=head.metadata.get("tokenizer.chat_template"),
    )


def _read_optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _directory_template(path: Path, in_config: str | list[dict[str, str]] | None) -> str | None:
    """The template in its own file, or in tokenizer_config.json: alone, or among several by name."""
    if (file := path / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    if isinstance(in_config, list):
        return next((each["template"] for each in in_config if each["name"] == "default"), None)
    return in_config


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the rest for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
