"""A server that speaks S3, with one bucket."""

import http.client
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.processes import until
from tests.servers import free_port

_KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


@contextmanager
def bucket() -> Iterator[dict[str, str]]:
    """Yields the environment of who keeps files in it."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: _created(port), "the S3 server answers")
        yield {**_KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "FILES_URL": "s3://bucket/kvrelay"}
    finally:
        server.kill()
        server.wait()


def _created(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("PUT", "/bucket")
        return connection.getresponse().status == 200
    except OSError:
        return False
