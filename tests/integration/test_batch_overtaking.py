"""A client's request over the real relay while a batch waits: it overtakes the lines at both legs."""

import secrets
from pathlib import Path
from typing import Any

import openai

from tests.batch_rig import ProcessorProcess, as_file, chat_lines
from tests.gateway_rig import GatewayProcess
from tests.processes import until
from tests.relay_rig import Relay, tiny_model
from tests.servers import RedisServer

LINES = 30
SLOTS = 2


def test_a_request_overtakes_the_lines_that_wait(valkey: RedisServer, tmp_path: Path) -> None:
    env = {
        "MODEL": str(tiny_model(tmp_path / "model")),
        "FILES_URL": str(tmp_path / "files"),
        "BATCH_OPEN_LINES": str(LINES),
        "MAX_RUNNING": str(SLOTS),
    }
    model = f"overtaken-{secrets.token_hex(4)}"
    relay = Relay(valkey, tmp_path, model, **env)
    try:
        relay.start("prefill", "decode")
        relay.ready()
        with GatewayProcess(valkey.url, model, tmp_path / "gateway", **env) as gateway:
            client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=30)
            lines = as_file(chat_lines(LINES, max_tokens=120, ignore_eos=True))
            file = client.files.create(file=("lines.jsonl", lines), purpose="batch")
            endpoint: Any = "/v1/completions"
            batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
            with ProcessorProcess(tmp_path / "processor", **relay.env):
                until(lambda: len(relay.rooms.list_requests(100)) == LINES, "all lines are submitted")
                reply = gateway.call("POST", "/v1/requests", {"prompt": "now", "max_tokens": 4})
                mine = reply.body["id"]
                until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch ends", 90.0)
    finally:
        records = {record.request_id: record for record in relay.rooms.list_requests(100)}
        relay.close()
    own = records.pop(mine)
    assert len(records) == LINES
    earlier = [record for record in records.values() if record.timings.submitted < own.timings.submitted]
    assert len(earlier) == LINES
    waiting = [record for record in earlier if record.timings.claimed > own.timings.submitted]
    assert len(waiting) > LINES // 2, "too late to overtake anything"
    assert all(record.timings.claimed > own.timings.claimed for record in waiting)
    undecoded = [record for record in earlier if record.timings.decode_claimed > own.timings.ready]
    assert all(record.timings.decode_claimed > own.timings.decode_claimed for record in undecoded)
    overtaken = [record for record in earlier if record.timings.ended > own.timings.ended]
    assert len(overtaken) >= LINES // 2
