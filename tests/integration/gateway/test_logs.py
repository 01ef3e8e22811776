"""What a gateway writes down of its clients at the level info: neither their keys nor what they say."""

import secrets
from pathlib import Path

from relay.request import Finish
from relay.rooms import Rooms
from relay.tokenizer import Tokenizer
from tests.gateway_rig import Answering, GatewayProcess, ScriptedWorker, words
from tests.servers import RedisServer

MODEL = f"logs-{secrets.token_hex(4)}"
SAID, ANSWERED = "kumquat", " tangerine"


def test_neither_keys_nor_texts_are_logged(
    valkey: RedisServer, rooms: Rooms, worker: ScriptedWorker, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    log, key, wrong = tmp_path / "log", secrets.token_hex(16), secrets.token_hex(16)
    named = {"Authorization": f"Bearer {key}"}
    bodies = [
        ("/v1/requests", {"prompt": SAID}),
        ("/v1/completions", {"prompt": SAID, "stop": SAID, "max_tokens": 20}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SAID}], "user": SAID}),
        ("/v1/responses", {"input": SAID, "instructions": SAID}),
        ("/generate", {"text": SAID}),
        ("/tokenize", {"prompt": SAID}),
    ]
    refused = [
        ("/v1/completions", {"prompt": {SAID: SAID}}),
        ("/v1/completions", {"prompt": SAID, "regex": f"({SAID}"}),
        ("/v1/chat/completions", {"messages": [{"role": SAID, "content": SAID}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": SAID, "text": SAID}]}]}),
    ]
    with (
        GatewayProcess(valkey.url, MODEL, log, LOG_LEVEL="INFO", API_KEY=key) as gateway,
        Answering(worker, words(tokenizer, ANSWERED), Finish("stop", None, "")).running(),
    ):
        for path, body in bodies:
            assert gateway.call("POST", path, body, **named).status in (200, 202), path
            assert gateway.call("POST", path, body, Authorization=f"Bearer {wrong}").status == 401
        for path, body in refused:
            assert gateway.call("POST", path, body, **named).status == 400, path
    written = log.read_text()
    assert written.count("submitted") == 5, "the level is info"
    for secret in (key, wrong, SAID, ANSWERED.strip()):
        assert secret not in written
