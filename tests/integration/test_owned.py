"""Files, batches and responses belong to the key that made them: nobody else finds, reads or ends them."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from app.gateway.keys import new_key, stanza
from relay.request import Finish
from relay.rooms import Rooms
from tests.batch_rig import ProcessorProcess, as_file, chat_lines
from tests.gateway_rig import Answering, GatewayProcess, ScriptedWorker, default_tokenizer, eventually, words
from tests.servers import RedisServer

MODEL = f"owned-{secrets.token_hex(4)}"
NAMES = ("ann", "bob", "root")


@pytest.fixture(scope="module")
def clients(valkey: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[openai.OpenAI]]:
    """Of Ann, of Bob and of an admin, beside a processor."""
    folder: Path = tmp_path_factory.mktemp("owned")
    keys = [new_key() for _ in NAMES]
    file = folder / "keys.toml"
    file.write_text("".join(stanza(name, key, name == "root") for name, key in zip(NAMES, keys)))
    env = {
        "REDIS_URL": valkey.url,
        "SERVED_NAME": MODEL,
        "FILES_URL": str(folder / "files"),
        "API_KEYS_FILE": str(file),
    }
    with (
        GatewayProcess(valkey.url, MODEL, folder / "gateway", **env) as gateway,
        ProcessorProcess(folder / "processor", **env),
    ):
        yield [openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) for key in keys]


@pytest.fixture
def answering(valkey: RedisServer) -> Iterator[None]:
    rooms = Rooms(valkey.url, MODEL)
    spoken = words(default_tokenizer(), " yes")
    with ScriptedWorker(rooms) as worker, Answering(worker, spoken, Finish("stop")).running():
        yield
    rooms.close()


def test_a_batch_and_its_files(clients: list[openai.OpenAI], answering: None) -> None:
    ann, bob, root = clients
    file = ann.files.create(file=("x", as_file(chat_lines(3))), purpose="batch")
    with pytest.raises(openai.NotFoundError):
        bob.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    batch = ann.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    eventually(lambda: ann.batches.retrieve(batch.id).status == "completed", "the batch ends")
    output = ann.batches.retrieve(batch.id).output_file_id or ""
    for foreign in (file.id, output):
        calls: tuple[Callable[[str], object], ...] = (bob.files.retrieve, bob.files.content, bob.files.delete)
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                call(foreign)
        assert root.files.retrieve(foreign).id == foreign
    calls = (bob.batches.retrieve, bob.batches.cancel)
    for call in calls:
        with pytest.raises(openai.NotFoundError):
            call(batch.id)
    assert list(bob.files.list()) == list(bob.batches.list()) == []
    assert {each.id for each in ann.files.list()} == {file.id, output}


def test_a_response(clients: list[openai.OpenAI], answering: None) -> None:
    ann, bob, root = clients
    response = ann.responses.create(model=MODEL, input="Hello", background=True)
    for call in (bob.responses.retrieve, bob.responses.cancel, bob.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(response.id)
    with pytest.raises(openai.NotFoundError):
        bob.responses.create(model=MODEL, input="And?", previous_response_id=response.id)
    eventually(lambda: ann.responses.retrieve(response.id).status == "completed", "the response ends")
    assert root.responses.retrieve(response.id).output_text == " yes"
