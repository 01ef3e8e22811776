"""Files that nobody will ask for any more."""

import logging
import time

from app.api.files import discard
from app.gateway.service import Service
from relay.files import object_name
from relay.log import event

log = logging.getLogger(__name__)

_UPLOAD_S = 86_400.0  # no upload takes so long, and no deletion


def sweep_expired(service: Service) -> None:
    """Delete files that have expired, unless a batch still reads them. Raises RedisError and ApiError."""
    in_use = service.batches.inputs()
    for file in service.files.expired(time.time()):
        if file.file_id not in in_use:
            discard(service, file)
            event(log, "file_expired", file=file.file_id)


def sweep_unfinished(service: Service, age_s: float = _UPLOAD_S) -> None:
    """Delete what a gateway had begun to store or to delete when it died. Raises RedisError and ApiError."""
    for file_id in service.files.unfinished(time.time() - age_s):
        service.storage.delete(object_name(file_id))
        service.files.forget(file_id)
        event(log, "object_swept", file=file_id)
