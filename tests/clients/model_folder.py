"""The default model as a Hugging Face folder: what clients tokenize with, and transformers computes from."""

from pathlib import Path

from transformers import AutoTokenizer

from relay.model_file import default_model_path
from relay.tokenizer import Tokenizer
from tests.models import default_model_in_transformers


def write_model_folder(folder: Path) -> None:
    """Write weights in float32, tokenizer and chat template."""
    path = default_model_path()
    default_model_in_transformers().save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = Tokenizer.load(path)
    assert ours.chat_template is not None
    tokenizer.chat_template = ours.chat_template.source
    tokenizer.save_pretrained(folder)
