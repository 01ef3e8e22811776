"""Fields that would change the result and are not implemented: refused by name, never ignored."""

from collections.abc import Collection
from typing import Any

from app.gateway.errors import ApiError, invalid

# With the values that change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "audio_data": (),
    "best_of": (1,),
    "bootstrap_host": (),
    "bootstrap_room": (),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "detokenize": (True,),
    "ec_transfer_params": ({},),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "image_data": (),
    "include_reasoning": (True,),
    "input_embeds": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora_path": (),
    "max_thinking_tokens": (),
    "mm_payload": (),
    "modalities": (["text"],),
    "moderation": (),
    "no_stop_trim": (False,),
    "prompt_embeds": (),
    "repetition_detection": (),
    "require_reasoning": (False,),
    "return_bytes": (False,),
    "return_entropy": (False,),
    "return_flat_raw_top_logprobs": (False,),
    "return_hidden_states": (False,),
    "return_indexer_topk": (False,),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_sampling_mask": (False,),
    "return_token_offsets": (False,),
    "rid": (),
    "routed_experts_prompt_start": (0,),
    "session_params": ({},),
    "stop_regex": ([], ""),
    "stream_interval": (1,),
    "structural_tag": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "token_ids_logprob": ([],),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "video_data": (),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}

_INSTEAD = {
    "best_of": "/v1/completions has it, here send n",
    "suffix": "no model served here fills in the middle of a text",
    "functions": "send them as tools",
    "function_call": "send tool_choice",
    "rid": "send request_id, or the header X-Request-Id",
    "no_stop_trim": "send include_stop_str_in_output",
}


def unsupported(name: str, instead: str = "leave it out") -> ApiError:
    return invalid(f"{name} is not supported here: {instead}.", name, code="unsupported_parameter")


def refuse_unsupported(fields: dict[str, Any], known: Collection[str]) -> None:
    """Raises ApiError for the first field that is here, unless its value changes nothing or it is one of the
    `known`."""
    for name, harmless in UNSUPPORTED.items():
        if name in fields and name not in known and not is_one_of(fields[name], harmless):
            raise unsupported(name, _INSTEAD.get(name, "leave it out"))


def is_one_of(value: Any, others: Collection[Any]) -> bool:
    """A bool is none of the numbers."""
    return any(type(value) is type(other) and bool(value == other) for other in others)
