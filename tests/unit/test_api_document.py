"""docs/api.md names every path and every error code that the gateway has."""

import re
from pathlib import Path

from flask import Flask

from app.gateway.gateway import RESOURCES

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "api.md").read_text()


def test_every_path_is_documented() -> None:
    app = Flask("paths", static_folder=None)
    for module in RESOURCES:
        app.register_blueprint(module.resource)
    for rule in app.url_map.iter_rules():
        path = re.sub(r"<(?:path:)?(?:request_)?(\w+)>", r"<\1>", rule.rule)
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}:
            assert f"`{method} {path}`" in DOC


def test_every_error_code_is_documented() -> None:
    internal = {"reader_died", "client_gone", "stream_lost"}
    for file in (ROOT / "app").rglob("*.py"):
        codes = set(re.findall(r'code(?:: str)? ?= ?"(\w+)"', file.read_text()))
        assert not {code for code in codes - internal if f"`{code}`" not in DOC}, file
