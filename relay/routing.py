"""Which queue a doorbell goes to, which queue a worker listens to, and what Celery calls it."""

import re

from relay.request import Leg

ROLES = ("prefill", "decode", "unified")
_UNSAFE = re.compile(r"[^\w.-]")


def queue_of(leg: Leg, model: str) -> str:
    """The Celery queue that rings for `leg`: `prefill.<model>` or `decode.<model>`."""
    assert leg is not Leg.BOTH, "a unified worker is rung for the prefill leg"
    return f"{leg}.{model.replace(',', '-')}"  # Celery's option -Q takes a comma for the next queue


def queue_for(role: str, model: str) -> str:
    """The Celery queue that a worker of `role` consumes: a unified worker stands where prefill workers do."""
    assert role in ROLES, role
    return queue_of(Leg.DECODE if role == "decode" else Leg.PREFILL, model)


def node_name(name: str, model: str) -> str:
    """What a worker is called before the @: those of other models may share its host and broker."""
    return f"{name}.{_UNSAFE.sub('-', model)}"


def short_name(node: str, model: str) -> str:
    """`name` as it was given to `node_name`, of a node with or without its host."""
    return node.partition("@")[0].removesuffix(node_name("", model))
