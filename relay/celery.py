"""The Celery app: a doorbell per leg, and nothing of a request but its id."""

import logging
import secrets
import time
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

from celery import Celery, signals
from celery.app.amqp import AMQP
from celery.exceptions import CPendingDeprecationWarning
from kombu.connection import Connection
from kombu.exceptions import OperationalError

from relay import log as logs
from relay.broker import use_lasting_clients
from relay.log import event
from relay.redis_url import RedisUrl
from relay.request import Leg, Ring
from relay.routing import queue_of
from relay.settings import Settings

log = logging.getLogger(__name__)

TASK_OF_LEG = {Leg.PREFILL: "kvrelay.prefill", Leg.DECODE: "kvrelay.decode"}
FLUSH_CACHE = "flush_cache"
RUNG_AT = "rung_at"  # header: when a doorbell was sent, seconds since the epoch
LEG_OF_TASK = {name: leg for leg, name in TASK_OF_LEG.items()}

_CONTROL_S = 3.0

# Without a bound, kombu's publishers wait for a broker as long as it is away.
_CONNECT_ONCE = {"max_retries": 1, "interval_start": 0.0, "interval_step": 0.1, "interval_max": 0.1}


class _Connection(Connection):
    """Comes back within two seconds after an outage; Celery's own steps grow to half a minute."""

    def ensure_connection(self, *args: Any, **kwargs: Any) -> Connection:
        steps = {"interval_start": 0.5, "interval_step": 0.5, "interval_max": 2.0}
        super().ensure_connection(*args, **(steps | kwargs))  # type: ignore[no-untyped-call]
        return self


class _AMQP(AMQP):  # type: ignore[misc]
    Connection = _Connection

    def TaskConsumer(self, *args: Any, **kwargs: Any) -> Any:
        """What is taken leaves the broker: it keeps no copy for us to acknowledge, two commands for each."""
        return super().TaskConsumer(*args, no_ack=True, **kwargs)


use_lasting_clients()
_broker = RedisUrl.parse(Settings.from_env().celery_broker).celery()
app = Celery("kvrelay", broker=_broker.url, amqp=_AMQP, set_as_current=True)
app.conf.update(
    broker_use_ssl=_broker.use_ssl,
    # The message is a credit, the request record is the truth: gone from the broker on arrival.
    task_acks_late=False,
    task_reject_on_worker_lost=False,
    worker_prefetch_multiplier=1,
    worker_disable_prefetch=True,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    worker_enable_prefetch_count_reduction=False,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_transport_options={
        "socket_timeout": 2,
        "socket_connect_timeout": 2,
        "socket_keepalive": True,
        "health_check_interval": 25,
        "visibility_timeout": 3600,
        "queue_order_strategy": "priority",
        **_CONNECT_ONCE,
        **_broker.transport_options,
    },
    # Nobody waits for a Celery result: clients read the request record.
    task_ignore_result=True,
    task_serializer="json",
    result_serializer="json",
    event_serializer="json",
    accept_content=["json"],
    worker_send_task_events=True,
    task_send_sent_event=True,
    task_track_started=True,
    worker_hijack_root_logger=False,
    worker_redirect_stdouts=False,
)


def ring(bell: Ring) -> bool:
    """Ring for one leg of a request of this process's model.

    False, within a few seconds, when the broker cannot be reached. The record already says that the leg
    waits, so a lost bell costs the time until the reaper rings again.
    """
    try:
        app.send_task(
            TASK_OF_LEG[bell.leg],
            args=(bell.request_id,),
            task_id=f"{bell.request_id}:{bell.leg}:{secrets.token_hex(4)}",
            queue=queue_of(bell.leg, _model_name()),
            headers={RUNG_AT: time.time()},
            argsrepr=_shown(bell),
            kwargsrepr="{}",
            retry=False,
        )
    except OperationalError as error:
        event(log, "ring_failed", logging.WARNING, request=bell.request_id, leg=bell.leg, error=error)
        return False
    return True


def flush_cache(workers: Sequence[str]) -> dict[str, int]:
    """Tell these workers to forget their prefix caches. Cached pages of each one that has answered in time.

    Raises OperationalError when the broker cannot be reached.
    """
    if not workers:
        return {}
    replies = app.control.broadcast(
        FLUSH_CACHE, destination=list(workers), reply=True, limit=len(workers), timeout=_CONTROL_S
    )
    return {name: pages for reply in replies or [] for name, pages in reply.items()}


def _shown(bell: Ring) -> str:
    """What Flower shows for arguments. Who hands a doorbell back does not know the size of its prompt."""
    return (
        f"({bell.request_id!r}, {bell.prompt_tokens} tok)"
        if bell.prompt_tokens
        else f"({bell.request_id!r},)"
    )


@cache
def _model_name() -> str:
    return Settings.from_env().model_name


def _run_elsewhere(request_id: str) -> None:
    raise RuntimeError("a leg runs in EnginePool only: start the worker with `kvrelay worker`")


for _name in LEG_OF_TASK:
    app.task(name=_name, acks_late=False)(_run_elsewhere)


@signals.setup_logging.connect  # type: ignore[untyped-decorator]
def _configure_logs(**_: Any) -> None:
    # Celery says at each reconnect that the default of a setting will change, also when it is set.
    warnings.filterwarnings("ignore", category=CPendingDeprecationWarning)
    logs.configure(Settings.from_env().log_level)
