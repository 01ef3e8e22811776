"""The first question of `kvrelay up`, never answered: whoever stops it is not kept waiting."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from app.launch.sample import SampleFailed, ask


class Stopped(Exception):
    pass


@pytest.fixture
def record() -> dict[str, object]:
    """Of the request, as it is told each time."""
    return {"id": "req-1", "status": "queued", "error": None, "links": {"self": "/v1/requests/req-1"}}


@pytest.fixture
def unsent_bytes() -> int:
    """How much of each answer is promised and does not come."""
    return 0


@pytest.fixture
def url(record: dict[str, object], unsent_bytes: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(record).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body) + unsent_bytes))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_each_second_there_is_a_turn_which_may_stop_it(url: str) -> None:
    turns = []

    def turn() -> None:
        turns.append(1)
        if len(turns) == 3:
            raise Stopped

    with pytest.raises(Stopped):
        ask(url, "", turn)


def test_a_question_that_somebody_cancels_is_given_up(url: str, record: dict[str, object]) -> None:
    record["status"] = "cancelled"
    with pytest.raises(SampleFailed, match="req-1 is cancelled"):
        ask(url, "", lambda: pytest.fail("there is nothing to wait for"))


@pytest.mark.parametrize("unsent_bytes", [7])
def test_an_answer_that_breaks_off_is_told(url: str, unsent_bytes: int) -> None:
    with pytest.raises(SampleFailed, match="7 more expected"):
        ask(url, "", lambda: None)
