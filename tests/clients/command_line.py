"""The `llm` command line."""

import re

from tests.clients.report import Report, Site

PROMPT = "Name three primary colors."


def llm(site: Site) -> list[Report]:
    folder = site.out / ".config" / "io.datasette.llm"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "extra-openai-models.yaml").write_text(
        f"- model_id: kvrelay\n  model_name: {site.model}\n  api_base: {site.url}/v1\n  api_key_name: none\n"
    )
    return [_asked(site, *more) for more in ([], ["--no-stream"])]


def _asked(site: Site, *more: str) -> Report:
    said = site.run("llm", "--key", "none", "-m", "kvrelay", "-u", "-o", "temperature", "0", *more, PROMPT)
    assert "Red" in said, said
    usage = re.search(r"Token usage: ([\d,]+) input, ([\d,]+) output", said)
    assert usage, said
    return Report(1, *(int(count.replace(",", "")) for count in usage.groups()))
