"""Where the processes of this machine are asked: an address that they listen on, as URLs write it."""

_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def netloc(host: str, port: int) -> str:
    """`host`:`port`, with IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def base_url(host: str, port: int) -> str:
    """Of what listens on `host`, which may stand for all addresses."""
    return f"http://{netloc(_ANY.get(host, host), port)}"
