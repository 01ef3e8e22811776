"""A request that ends between the two reads of a poll: record and text must tell the same."""

from collections.abc import Iterator

import pytest
from flask import Flask

from app.gateway.gateway import create_app
from app.gateway.service import KEY, Service
from relay.request import Finish
from relay.rooms import Rooms
from relay.settings import Settings
from relay.tokens import Chunk, TokenReader
from tests.gateway_rig import ScriptedWorker, default_tokenizer, words
from tests.servers import RedisServer


@pytest.fixture
def app(valkey: RedisServer, model: str) -> Iterator[Flask]:
    app = create_app(Settings(redis_url=valkey.url, served_name=model), ring=lambda ring: None)
    yield app
    app.extensions[KEY].close()


def test_the_record_is_read_again(
    app: Flask, valkey: RedisServer, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service: Service = app.extensions[KEY]
    story = words(default_tokenizer(), " and then it ended")
    rooms = Rooms(valkey.url, model)
    with ScriptedWorker(rooms) as worker:
        path = app.test_client().post("/v1/requests", json={"prompt": "Once"}).headers["Location"]
        claimed = worker.claim()
        worker.emit(claimed, story[:1])
        read = service.tokens.read

        def read_after_the_end(request_id: str, position: int = 0) -> Chunk:
            worker.emit(claimed, story[1:], Finish("stop"))
            return read(request_id, position)

        monkeypatch.setattr(TokenReader, "read", lambda self, *args: read_after_the_end(*args))
        view = app.test_client().get(path).get_json()
    rooms.close()
    assert (view["status"], view["text"]) == ("finished", " and then it ended")
    assert view["usage"]["completion_tokens"] == view["position"] == len(story)
