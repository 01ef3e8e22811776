"""What is remembered of a response beside its request: the conversation, and what its client asked for."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from redis import Redis


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`items` is the whole conversation that was answered. `echo` are the fields that an answer repeats.

    `created` in seconds since the epoch. `top_logprobs` None: the answer shows no logprobs.
    """

    response_id: str
    request_id: str
    owner: str
    created: int
    background: bool
    items: list[dict[str, Any]]
    echo: dict[str, Any]
    top_logprobs: int | None


class Responses:
    """The stored responses of one model. Every call may run twice without harm."""

    def __init__(self, redis: Redis, root: str) -> None:
        self._redis = redis
        self._root = root

    def add(self, response: StoredResponse, ttl_s: int) -> None:
        self._redis.set(self._key(response.response_id), json.dumps(asdict(response)), ex=ttl_s)

    def find(self, response_id: str) -> StoredResponse | None:
        text: Any = self._redis.get(self._key(response_id))
        return StoredResponse(**json.loads(text)) if text else None

    def remove(self, response_id: str) -> bool:
        """False when there was none."""
        removed: Any = self._redis.delete(self._key(response_id))
        return bool(removed)

    def _key(self, response_id: str) -> str:
        return f"{self._root}:response:{response_id}"
