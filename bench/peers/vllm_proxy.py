"""`vllm_proxy.py PORT PREFILL_URL DECODE_URL`: joins a prefill and a decode engine of vLLM.

Runs in vLLM's environment. A request first goes to prefill for one token; what that answers in
`kv_transfer_params` tells decode where the KV is, and decode's stream goes to the client as it comes.
"""

import sys
import uuid
from typing import Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

_ASK_PREFILL = {"stream": False, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}


class Proxy:
    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill = prefill
        self._decode = decode

    async def session(self, app: web.Application) -> Any:
        connector = TCPConnector(limit=0)
        async with ClientSession(timeout=ClientTimeout(total=None), connector=connector) as self._session:
            yield

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {"X-Request-Id": uuid.uuid4().hex}
        asked = {name: value for name, value in body.items() if name != "stream_options"} | _ASK_PREFILL
        async with self._session.post(self._prefill + request.path, json=asked, headers=headers) as prefilled:
            if prefilled.status != 200:
                return web.Response(status=prefilled.status, body=await prefilled.read())
            body["kv_transfer_params"] = (await prefilled.json())["kv_transfer_params"]
        async with self._session.post(self._decode + request.path, json=body, headers=headers) as decoded:
            response = web.StreamResponse(
                status=decoded.status, headers={"Content-Type": decoded.content_type}
            )
            await response.prepare(request)
            async for part in decoded.content.iter_any():
                await response.write(part)
            return response

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()


def main(port: str, prefill: str, decode: str) -> None:
    proxy = Proxy(prefill, decode)
    app = web.Application(client_max_size=64 << 20)
    app.cleanup_ctx.append(proxy.session)
    app.add_routes([web.post("/v1/completions", proxy.complete), web.get("/health", proxy.health)])
    web.run_app(app, host="127.0.0.1", port=int(port), access_log=None, print=None)


if __name__ == "__main__":
    main(*sys.argv[1:])
