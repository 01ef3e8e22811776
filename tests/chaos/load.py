"""The requests that a disturbed system serves, and their undisturbed texts."""

import random
from collections.abc import Sequence
from itertools import groupby

from relay.request import State
from relay.sampling import SamplingParams
from relay.settings import Settings
from relay.tokenizer import Tokenizer
from tests.chaos.cluster import Cluster
from tests.chaos.watch import Text, Watch

WORDS = (
    "river", "engine", "window", "small", "green", "letter", "morning", "teacher", "running", "under",
    "yesterday", "before", "seven", "bright", "kitchen", "question", "because", "paper", "silent", "north",
)  # fmt: skip
OPEN = 16
MAX_TOKENS = 24
ANSWERED_S = 120.0

Prompt = tuple[int, ...]


def prompts(seed: int, count: int = OPEN) -> list[Prompt]:
    """`count` chat prompts of about 20 to 200 tokens. Some come three times in a row, as samples."""
    draw = random.Random(seed)
    tokenizer = Tokenizer.load(Settings.from_env({}).model_path)
    made: list[Prompt] = []
    while len(made) < count:
        words = " ".join(draw.choices(WORDS, k=draw.randint(5, 150)))
        chat = tokenizer.apply_chat_template([{"role": "user", "content": f"Write a story with: {words}."}])
        prompt = tuple(tokenizer.encode(chat, add_special_tokens=False))
        made += [prompt] * (3 if len(made) % 5 == 1 else 1)
    return made[:count]


def greedy(max_tokens: int = MAX_TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def submit(
    cluster: Cluster, load: Sequence[Prompt], max_tokens: int = MAX_TOKENS, rings: int = 1
) -> list[str]:
    groups = [(prompt, len(list(same))) for prompt, same in groupby(load)]
    return [
        request_id
        for prompt, samples in groups
        for request_id in cluster.submit(prompt, greedy(max_tokens), rings, samples)
    ]


def undisturbed(cluster: Cluster, load: Sequence[Prompt], max_tokens: int = MAX_TOKENS) -> list[Text]:
    """The texts while nothing happens. Raises AssertionError if one of them fails."""
    cluster.disarm()
    ids = submit(cluster, load, max_tokens)
    watch = Watch(cluster, ids)
    ended = watch.all_ended(ANSWERED_S)
    assert not watch.problems, watch.problems
    assert all(text.state is State.FINISHED for text in ended.values()), ended
    cluster.forget()
    return [ended[request_id] for request_id in ids]
