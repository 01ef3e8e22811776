"""The note by which an interrupted `kvrelay batch run` goes on, where what it names is gone meanwhile."""

import hashlib
import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from app.commands.api_client import ApiRefused
from app.commands.batch_command import BatchCommand


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "night.jsonl"
    path.write_text('{"url": "/v1/completions"}\n')
    return path


def noted(requests: Path, **what: str) -> Path:
    note = requests.with_name("night.output.jsonl.batch")
    note.write_text(json.dumps({"sha256": hashlib.sha256(requests.read_bytes()).hexdigest(), **what}))
    return note


def test_a_file_that_was_deleted_is_not_named_for_ever(requests: Path) -> None:
    note = noted(requests, file_id="file-1")
    client = Mock(post=Mock(side_effect=ApiRefused("There is no file.", "file_not_found")))
    with pytest.raises(ApiRefused, match="Run the command again"):
        BatchCommand(client).run(requests, None, "24h")
    assert not note.exists()


def test_a_batch_that_expired_is_not_named_for_ever(requests: Path) -> None:
    note = noted(requests, file_id="file-1", batch_id="batch-1")
    client = Mock(get=Mock(side_effect=ApiRefused("There is no batch.", "batch_not_found")))
    with pytest.raises(ApiRefused, match="Run the command again"):
        BatchCommand(client).run(requests, None, "24h")
    assert not note.exists()


def test_what_is_no_gateway_says_nothing_about_a_batch(requests: Path) -> None:
    note = noted(requests, file_id="file-1", batch_id="batch-1")
    client = Mock(get=Mock(side_effect=ApiRefused("404 page not found")))
    with pytest.raises(ApiRefused):
        BatchCommand(client).run(requests, None, "24h")
    assert note.exists(), "the batch goes on where it is"
