"""/v1/files: what clients upload for batches, and what batches leave for them."""

import re
import time
from collections.abc import Iterator
from typing import Any

from flask import Blueprint, Response, jsonify, request
from werkzeug.datastructures import FileStorage

from app.gateway.access import caller
from app.gateway.arguments import choice_argument, whole, whole_argument
from app.gateway.errors import ApiError, invalid
from app.gateway.page import first_of
from app.gateway.receive import receiving, too_large
from app.gateway.service import Service, service
from relay.files import File, new_file_id

resource = Blueprint("files", __name__)

PURPOSES = ("batch", "user_data", "assistants", "evals", "fine-tune", "vision")
BATCH_OUTPUT = "batch_output"
MAX_PAGE = 10_000
_PIECE_BYTES = 1 << 20
_FORM_BYTES = 1 << 16  # what the form has beside the file
_EXPIRES_S = (3_600, 2_592_000)
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")


@resource.post("/v1/files")
def create() -> Response:
    s = service()
    upload = _upload(s)
    purpose = request.form.get("purpose", "")
    if purpose not in PURPOSES:
        raise invalid(f"purpose must be one of {', '.join(PURPOSES)}, not {purpose!r}.", "purpose")
    expires_s = _expires_s()
    size_bytes = upload.stream.seek(0, 2)
    upload.stream.seek(0)
    if size_bytes > s.settings.max_file_bytes:
        raise too_large(s.settings.max_file_bytes)
    name = (upload.filename or "upload")[-255:]
    file = File.new(new_file_id(), caller().name, name, purpose, size_bytes, expires_s)
    s.files.begin(file.file_id)
    s.storage.write(file.stored_as, iter(lambda: upload.stream.read(_PIECE_BYTES), b""))
    s.files.add(file)
    return jsonify(_view(file))


@resource.get("/v1/files")
def list_all() -> Response:
    s = service()
    limit = whole_argument("limit", 1, MAX_PAGE) or MAX_PAGE
    newest_first = choice_argument("order", "desc", "asc") == "desc"
    after, purpose = request.args.get("after"), request.args.get("purpose")
    found = s.files.of(caller().name, after, limit + 1, purpose, newest_first)
    if found is None:
        raise _unknown(after or "")
    return jsonify(first_of([_view(file) for file in found], limit))


@resource.get("/v1/files/<file_id>")
def show(file_id: str) -> Response:
    return jsonify(_view(find(service(), file_id)))


@resource.get("/v1/files/<file_id>/content")
def content(file_id: str) -> Response:
    s = service()
    file = find(s, file_id)
    pieces = s.storage.read(file.stored_as)
    try:
        first = next(pieces, b"")
    except FileNotFoundError:
        raise ApiError(500, "The storage has lost this file: upload it again.", code="file_lost") from None
    response = Response(_with(first, pieces), content_type="application/octet-stream")
    response.content_length = file.size_bytes
    return response


@resource.delete("/v1/files/<file_id>")
def delete(file_id: str) -> Response:
    s = service()
    file = find(s, file_id)
    if file_id in s.batches.inputs():
        raise ApiError(
            409, "A batch still reads this file: wait for its end, or cancel it.", code="file_in_use"
        )
    discard(s, file)
    return jsonify({"id": file_id, "object": "file", "deleted": True})


def find(s: Service, file_id: str) -> File:
    """A file of the caller. Raises ApiError (404)."""
    file = s.files.find(file_id) if _FILE_ID.fullmatch(file_id) else None
    expired = file is not None and file.expires is not None and file.expires <= time.time()
    if file is None or expired or not caller().may_see(file.owner):
        raise _unknown(file_id)
    return file


def discard(s: Service, file: File) -> None:
    """Entry first, object last: what is cut off between them is swept later."""
    s.files.remove(file)
    s.storage.delete(file.stored_as)
    s.files.forget(file.file_id)


def _unknown(file_id: str) -> ApiError:
    return ApiError(404, f"There is no file {file_id!r}.", code="file_not_found")


def _upload(s: Service) -> FileStorage:
    """The form's file, which lies in a temporary file and not in memory."""
    with receiving(s.settings.max_file_bytes + _FORM_BYTES):
        found = request.files.getlist("file")
    if len(found) != 1:
        raise invalid("Send one file as multipart/form-data, in a part named file.", "file")
    return found[0]


def _expires_s() -> int | None:
    anchor, seconds = request.form.get("expires_after[anchor]"), request.form.get("expires_after[seconds]")
    if anchor is None and seconds is None and "expires_after" not in request.form:
        return None
    if anchor != "created_at" or seconds is None:
        raise invalid(
            "expires_after must come as expires_after[anchor], created_at, and expires_after[seconds].",
            "expires_after",
        )
    return whole("expires_after[seconds]", seconds, *_EXPIRES_S)


def _with(first: bytes, more: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from more


def _view(file: File) -> dict[str, Any]:
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": file.created,
        "expires_at": file.expires,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }
