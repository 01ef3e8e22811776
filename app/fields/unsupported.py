"""Fields that would change the result and are not implemented: refused by name, never ignored."""

from collections.abc import Collection
from typing import Any

from app.gateway.errors import invalid

# With the values that change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "audio_data": (),
    "best_of": (1,),
    "custom_logit_processor": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "image_data": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "lora_path": (),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "prompt_embeds": (),
    "return_hidden_states": (False,),
    "rid": (),
    "session_params": ({},),
    "stop_regex": ([], ""),
    "stream_interval": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "video_data": (),
    "vllm_xargs": ({},),
    "web_search_options": (),
}

_WHY = {
    "best_of": "best_of is supported by /v1/completions only: send n.",
    "suffix": "suffix is not supported: no model served here fills in the middle of a text.",
    "functions": "functions is not supported: send them as tools.",
    "function_call": "function_call is not supported: send tool_choice.",
    "rid": "rid is not supported: send request_id, or the header X-Request-Id.",
    "no_stop_trim": "no_stop_trim is not supported: send include_stop_str_in_output.",
}


def refuse_unsupported(fields: dict[str, Any], known: Collection[str]) -> None:
    """Raises ApiError for the first field that is here, unless its value changes nothing or it is one of the
    `known`."""
    for name, harmless in UNSUPPORTED.items():
        if name in fields and name not in known and not any(_same(fields[name], value) for value in harmless):
            why = _WHY.get(name, f"{name} is not supported: leave it out.")
            raise invalid(why, name, code="unsupported_parameter")


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and bool(left == right)
