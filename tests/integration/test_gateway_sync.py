"""ACCEPT_SYNC: nothing is accepted, neither at first nor on a repeat, before Redis has it on disk."""

from pathlib import Path

import pytest

from app.gateway.gateway import create_app
from app.gateway.service import KEY
from relay.rooms import Rooms
from relay.settings import Settings
from tests.gateway_rig import ScriptedWorker
from tests.servers import RedisServer, valkey_binary


@pytest.mark.parametrize(
    ("append_fsync", "status"), [("always", 202), ("everysec", 202), ("no", 503), (None, 503)]
)
def test_a_submit_waits_for_the_disk(tmp_path: Path, append_fsync: str | None, status: int) -> None:
    with RedisServer(valkey_binary(), tmp_path / "data", append_fsync=append_fsync) as server:
        settings = Settings(redis_url=server.url, served_name="m", accept_sync=True, var_dir=str(tmp_path))
        app = create_app(settings, ring=lambda ring: None)
        rooms = Rooms(server.url, "m")
        with ScriptedWorker(rooms):
            for _ in range(2):
                response = app.test_client().post(
                    "/v1/requests",
                    json={"prompt": "a", "max_tokens": 1},
                    headers={"Idempotency-Key": "job"},
                )
                assert response.status_code == status
                if status == 503:
                    assert response.get_json()["error"]["code"] == "not_durable"
                    assert "Retry-After" in response.headers
        assert len(rooms.list_requests(9)) == 1
        app.extensions[KEY].close()
        rooms.close()
