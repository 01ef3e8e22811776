"""One page of a list, in OpenAI's form."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")


def page(
    items: Sequence[Item], after: str | None, limit: int, view: Callable[[Item], dict[str, Any]]
) -> dict[str, Any] | None:
    """At most `limit` of `items` behind the one with the id `after`; None when there is none with that id."""
    data = [view(item) for item in items]
    start = 0
    if after is not None:
        ids = [each["id"] for each in data]
        if after not in ids:
            return None
        start = ids.index(after) + 1
    return first_of(data[start:], limit)


def first_of(data: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """At most `limit` of what was found for one page; one more says that there are more."""
    shown = data[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(data) > limit,
    }
