"""The client of the commands, on a server whose streams break."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from app.commands.api_client import ApiAway, ApiClient, ApiRefused

TOKENS = [f'id: {i + 1}\ndata: {{"position": {i}, "text": "{i}"}}\n\n' for i in range(3)]
END = 'event: end\ndata: {"status": "finished", "text": "!"}\n\n'
ERROR = 'event: error\ndata: {"error": {"message": "Redis lost it."}}\n\n'


@contextmanager
def serving(*streams: str, length: int | None = None) -> Iterator[tuple[ApiClient, list[str]]]:
    """Answers one call with each of `streams`, and what was asked for; then none. `length` is promised."""
    asked: list[str] = []
    left = list(streams)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            if length is not None:
                self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(left.pop(0).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield ApiClient(f"http://127.0.0.1:{server.server_port}/", ""), asked
        finally:
            server.shutdown()
            thread.join()


def test_a_broken_stream_goes_on_where_it_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.commands.api_client._RETRY_S", 0.0)
    with serving("\n" + TOKENS[0] + TOKENS[1], "", TOKENS[2] + END) as (client, asked):
        items = list(client.follow("req-1"))
    assert "".join(item["text"] for item in items) == "012!"
    assert asked == [f"/v1/requests/req-1/stream?after={after}" for after in (0, 2, 2)]


def test_a_stream_that_never_begins_is_told_at_once() -> None:
    with serving("") as (client, _), pytest.raises(ApiAway, match="without an end"):
        list(client.follow("req-1"))


def test_what_redis_lost_is_told() -> None:
    with serving(TOKENS[0] + ERROR) as (client, _), pytest.raises(ApiRefused, match="Redis lost it"):
        list(client.follow("req-1"))


def test_a_server_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.commands.api_client._RETRY_S", 0.0)
    monkeypatch.setattr("app.commands.api_client._PATIENCE_S", 0.0)
    with serving(TOKENS[0], "", "") as (client, _), pytest.raises(ApiAway):
        list(client.follow("req-1"))


def test_what_is_no_gateway_is_told() -> None:
    with serving("<html>Flower</html>") as (client, _), pytest.raises(ApiRefused, match="URL of a gateway"):
        client.get("/v1/pools")


def test_an_answer_that_breaks_off_is_one_of_a_server_that_is_away() -> None:
    with serving('{"object": ', length=100) as (client, _), pytest.raises(ApiAway, match="before its end"):
        client.get("/v1/pools")
