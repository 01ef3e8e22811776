"""What `kvrelay batch` does: run a file of requests and follow it, also after an interruption."""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tqdm import tqdm

from app.commands.api_client import ApiAway, ApiClient, ApiRefused, Object

_POLL_S = 0.5
_RETRY_S = 2.0
_FINAL = ("completed", "failed", "expired", "cancelled")
_INTERRUPTED = 130
_GONE = ("file_not_found", "batch_not_found")

Answer = TypeVar("Answer")


class Files(NamedTuple):
    """Where things are. By its note an interrupted run goes on."""

    requests: Path
    output: Path
    errors: Path
    note: Path

    @classmethod
    def of(cls, requests: Path, output: Path | None) -> "Files":
        stem = requests.name.removesuffix(".jsonl")
        output = output or requests.with_name(f"{stem}.output.jsonl")
        errors = output.with_name(f"{output.name.removesuffix('.jsonl')}.errors.jsonl")
        return cls(requests, output, errors, output.with_name(f"{output.name}.batch"))


class BatchCommand:
    """Each method is one subcommand; it returns the exit status and raises ApiRefused."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    def run(self, requests: Path, output: Path | None, window: str) -> int:
        """0: each line was answered. 1: some were not, or the batch did not complete."""
        files = Files.of(requests, output)
        batch_id = ""
        try:
            note = self._begin(files, window)
            batch_id = note["batch_id"]
            batch = self._follow(batch_id)
            self._fetch(batch, files)
        except KeyboardInterrupt:
            # It may have been noted a moment before it would be known here.
            batch_id = _read_note(files.note, _digest(files.requests)).get("batch_id", "")
            going_on = f" {batch_id} goes on: run the same command to follow it." if batch_id else ""
            print(f"\nInterrupted.{going_on}", file=sys.stderr)
            return _INTERRUPTED
        except ApiRefused as refused:
            if refused.code in _GONE:
                files.note.unlink(missing_ok=True)
                raise ApiRefused(f"{refused} Run the command again to begin anew.", refused.code) from None
            raise
        files.note.unlink()
        return _conclude(batch, files)

    def status(self, batch_id: str) -> int:
        print(json.dumps(self._client.get(f"/v1/batches/{batch_id}"), indent=2))
        return 0

    def list_all(self) -> int:
        after = ""
        while True:
            page = self._client.get(f"/v1/batches?limit=100{after}")
            for batch in page["data"]:
                print(_line(batch))
            if not after and not page["data"]:
                print("There is no batch yet: kvrelay batch run FILE makes one.", file=sys.stderr)
            if not page["has_more"]:
                return 0
            after = f"&after={page['last_id']}"

    def cancel(self, batch_id: str) -> int:
        print(_line(self._client.post(f"/v1/batches/{batch_id}/cancel", {})))
        return 0

    # ---- run

    def _begin(self, files: Files, window: str) -> dict[str, str]:
        """Upload and create, or find what an earlier run has done of that. Each step is noted."""
        note = _read_note(files.note, _digest(files.requests))
        if "file_id" not in note:
            note["file_id"] = self._patiently(lambda: self._client.upload(files.requests, "batch"))["id"]
            _write_note(files.note, note)
        if "batch_id" not in note:
            body = {
                "input_file_id": note["file_id"],
                "endpoint": _endpoint(files.requests),
                "completion_window": window,
            }
            key = {"Idempotency-Key": note["file_id"]}  # the answer may be lost before it is noted
            note["batch_id"] = self._patiently(lambda: self._client.post("/v1/batches", body, **key))["id"]
            _write_note(files.note, note)
        return note

    def _follow(self, batch_id: str) -> Object:
        print(batch_id, file=sys.stderr)
        with tqdm(unit="line", file=sys.stderr, disable=None) as bar:
            while True:
                batch = self._patiently(lambda: self._client.get(f"/v1/batches/{batch_id}"))
                _show(bar, batch)
                if batch["status"] in _FINAL:
                    return batch
                time.sleep(_POLL_S)

    def _fetch(self, batch: Object, files: Files) -> None:
        for file_id, to in ((batch["output_file_id"], files.output), (batch["error_file_id"], files.errors)):
            to.unlink(missing_ok=True)
            if file_id:
                self._patiently(partial(self._client.download, f"/v1/files/{file_id}/content", to))

    def _patiently(self, call: Callable[[], Answer]) -> Answer:
        """Its answer, however long the gateway is away."""
        while True:
            try:
                return call()
            except ApiAway as away:
                print(f"{away} Trying again.", file=sys.stderr)
                time.sleep(_RETRY_S)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_note(path: Path, digest: str) -> dict[str, str]:
    """What is noted of a run of the same requests; else a new note."""
    try:
        note: dict[str, str] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        note = {}
    return note if note.get("sha256") == digest else {"sha256": digest}


def _write_note(path: Path, note: dict[str, str]) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(note))
    part.replace(path)


def _endpoint(path: Path) -> str:
    """Of the first line: all have the same one, or the batch is refused."""
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        return str(json.loads(first)["url"])
    except ValueError as error:
        raise ApiRefused(f"{path} is no file of requests: its first line is no JSON ({error}).") from None
    except (KeyError, TypeError):
        raise ApiRefused(f"{path} is no file of requests: its first line has no url.") from None


def _show(bar: Any, batch: Object) -> None:
    counts = batch["request_counts"]
    bar.total = counts["total"] or None
    bar.n = counts["completed"] + counts["failed"]
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    bar.set_description_str(f"{batch['status']}{failed}", refresh=False)
    bar.refresh()


def _conclude(batch: Object, files: Files) -> int:
    counts = batch["request_counts"]
    for error in (batch["errors"] or {"data": []})["data"]:
        place = f"{files.requests}:{error['line']}: " if error["line"] else ""
        print(f"{place}{error['message']}", file=sys.stderr)
    if batch["output_file_id"]:
        print(f"{counts['completed']} answered: {files.output}", file=sys.stderr)
    if batch["error_file_id"]:
        print(f"{counts['failed']} not answered: {files.errors}", file=sys.stderr)
    if batch["status"] != "completed":
        print(f"The batch is {batch['status']}.", file=sys.stderr)
    return os.EX_OK if batch["status"] == "completed" and not counts["failed"] else 1


def _line(batch: Object) -> str:
    counts = batch["request_counts"]
    done = f"{counts['completed'] + counts['failed']}/{counts['total']}"
    return f"{batch['id']}  {batch['status']:11}  {done:>13}  {counts['failed']} failed"
