"""A gateway for each file, with its MODEL and GATEWAY settings, and a scripted worker behind it."""

from collections.abc import Iterator

import openai
import pytest

from relay.request import Finish, Token
from relay.rooms import Rooms
from relay.tokenizer import Tokenizer
from tests.gateway_rig import (
    Answering,
    GatewayProcess,
    ScriptedWorker,
    cancel_all,
    default_tokenizer,
    words,
)
from tests.servers import RedisServer


@pytest.fixture(scope="module")
def gateway(
    request: pytest.FixtureRequest, valkey: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    settings = getattr(request.module, "GATEWAY", {})
    log = tmp_path_factory.mktemp("gateway") / "log"
    with GatewayProcess(valkey.url, request.module.MODEL, log, **settings) as process:
        yield process


@pytest.fixture(scope="module")
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return default_tokenizer()


@pytest.fixture
def rooms(request: pytest.FixtureRequest, valkey: RedisServer) -> Iterator[Rooms]:
    client = Rooms(valkey.url, request.module.MODEL)
    yield client
    cancel_all(client)
    client.close()


@pytest.fixture
def worker(rooms: Rooms) -> Iterator[ScriptedWorker]:
    with ScriptedWorker(rooms) as worker:
        yield worker


@pytest.fixture
def spoken(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> list[Token]:
    """The TEXT that every request is answered with."""
    return words(tokenizer, request.module.TEXT, logprobs=True)


@pytest.fixture
def answering(
    request: pytest.FixtureRequest, worker: ScriptedWorker, spoken: list[Token]
) -> Iterator[Answering]:
    """Says TEXT to each request; what is HELD comes with the end."""
    end = Finish("stop", None, getattr(request.module, "HELD", ""))
    with Answering(worker, spoken, end).running() as answering:
        yield answering
