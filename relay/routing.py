"""Which queue a doorbell goes to, and which queue a worker listens to."""

from relay.request import Leg

ROLES = ("prefill", "decode", "unified")


def queue_of(leg: Leg, model: str) -> str:
    """The Celery queue that rings for `leg`: `prefill.<model>` or `decode.<model>`."""
    assert leg is not Leg.BOTH, "a unified worker is rung for the prefill leg"
    return f"{leg}.{model}"


def queue_for(role: str, model: str) -> str:
    """The Celery queue that a worker of `role` consumes: a unified worker stands where prefill workers do."""
    assert role in ROLES, role
    return queue_of(Leg.DECODE if role == "decode" else Leg.PREFILL, model)
