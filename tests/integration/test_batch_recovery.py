"""A batch over the real relay while its processors, a worker and Redis are killed: each line once."""

import random
import secrets
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.batch_rig import ProcessorProcess, as_file, chat_lines, results
from tests.gateway_rig import GatewayProcess
from tests.processes import until
from tests.relay_rig import Relay, tiny_model
from tests.servers import RedisServer, valkey_binary

LINES = 120
SEED = 11
DEADLINE_S = 150.0


@pytest.mark.timeout(300)
def test_every_line_once_whatever_is_killed(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    model = f"night-{secrets.token_hex(4)}"
    env = {
        "MODEL": str(tiny_model(tmp_path / "model")),
        "FILES_URL": str(tmp_path / "files"),
        "BATCH_OPEN_LINES": "12",
        "MAX_OPEN_REQUESTS": "8",  # so lines have to wait, too
    }
    with RedisServer(valkey_binary(), tmp_path / "redis", "always") as server:
        relay = Relay(server, tmp_path, model, **env)
        try:
            relay.start("prefill", "decode")
            relay.ready()
            with GatewayProcess(server.url, model, tmp_path / "gateway", **env) as gateway:
                _run(relay, gateway, server, rng)
        finally:
            relay.close()


def _run(relay: Relay, gateway: GatewayProcess, server: RedisServer, rng: random.Random) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=30)
    lines = list(chat_lines(LINES, max_tokens=6, temperature=0, ignore_eos=True))
    file = client.files.create(file=("night.jsonl", as_file(lines)), purpose="batch")
    endpoint: Any = "/v1/completions"
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")

    def done() -> int:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts.completed + counts.failed if counts else 0

    for round_number, what in enumerate(("worker", "redis", "processor")):
        goal = (round_number + 1) * LINES // 4 - rng.randrange(LINES // 12)
        with ProcessorProcess(relay.folder / "processor", **relay.env) as processor:
            until(lambda goal=goal: done() >= goal, f"{goal} lines are done", DEADLINE_S)
            assert done() < LINES, "too late to kill anything"
            if what == "worker":
                relay.workers.pop(rng.randrange(2)).end()
                missing = {"prefill", "decode"} - {worker.role for worker in relay.workers}
                relay.start(*missing)
            elif what == "redis":
                server.restart()
                until(lambda goal=goal: done() >= goal + 8, "the same processor goes on", DEADLINE_S)
            processor.kill()
    with ProcessorProcess(relay.folder / "processor", **relay.env):
        until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch ends", DEADLINE_S)

    batch = client.batches.retrieve(batch.id)
    assert batch.request_counts
    assert batch.request_counts.to_dict() == {"total": LINES, "completed": LINES, "failed": 0}
    assert batch.error_file_id is None
    output = results(client.files.content(batch.output_file_id or "").read())
    assert output.keys() == {line["custom_id"] for line in lines}
    answers = Counter(each["response"]["body"]["id"] for each in output.values())
    assert set(answers.values()) == {1}, "two lines have the answer of one request"
    records = relay.rooms.list_requests(1000)
    assert len(records) == LINES, "a request was made twice"
    assert all(record.completion_tokens == 6 for record in records)
