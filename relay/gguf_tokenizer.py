"""The tokenizer that a GGUF file describes in its metadata, rebuilt."""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from relay.gguf import GGUFHead
from relay.model_file import ModelError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Where text is cut before merging, by tokenizer.ggml.pre: each pattern cuts what the one before left.
_SPLITS = {
    "default": [_GPT2_SPLIT],
    "gpt-2": [_GPT2_SPLIT],
    "smollm": [r"\p{N}", _GPT2_SPLIT],
    "llama-bpe": [_LLAMA3_SPLIT],
    "qwen2": [_LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")],
}


def build_gguf_tokenizer(head: GGUFHead) -> Tokenizer:
    """A tokenizer with the ids of the file. Raises ModelError if the file has none, or an unknown kind."""
    metadata = head.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or "tokenizer.ggml.tokens" not in metadata:
        raise ModelError("the GGUF file holds no tokenizer: convert the model again, with its tokenizer")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"tokenizer {kind!r} in the GGUF file is not supported, known are: gpt2, llama")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    tokenizer = _byte_level(metadata, tokens) if kind == "gpt2" else _sentencepiece(metadata, tokens, types)
    pairs = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t, of in pairs if of == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, of in pairs if of == _USER_DEFINED])
    _add_bos_and_eos(tokenizer, metadata, tokens)
    return tokenizer


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """GPT-2's scheme: merges over bytes that are spelled as printable characters."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise ModelError(f"pre-tokenizer {pre!r} is not supported, known are: {', '.join(_SPLITS)}")
    if "tokenizer.ggml.merges" not in metadata:
        raise ModelError("the GGUF file's tokenizer holds no merges: convert the model again")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes a whole word that is in the vocabulary before it tries merges.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], types: Sequence[int]) -> Tokenizer:
    """Llama 2's scheme: ▁ for spaces, merges in order of score, unknown characters as bytes."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise ModelError("the GGUF file's tokenizer holds no scores: convert the model again")
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _merges_by_score(vocab, scores, types)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = [normalizers.Replace(" ", "▁")]
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces])
        tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = normalizers.Sequence(spaces)
        tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def _merges_by_score(
    vocab: dict[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best third first."""
    ranked = []
    for token, i in vocab.items():
        if types[i] != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[i], vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_bos_and_eos(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str]) -> None:
    """Have `encode` put BOS before and EOS behind a text where the file says so, or its kind does."""
    always_bos = (
        metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    )
    template, special = "$A", []
    bos, eos = metadata.get("tokenizer.ggml.bos_token_id"), metadata.get("tokenizer.ggml.eos_token_id")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", always_bos):
        template, special = f"{tokens[bos]} {template}", [(tokens[bos], bos)]
    if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False):
        template, special = f"{template} {tokens[eos]}", [*special, (tokens[eos], eos)]
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
