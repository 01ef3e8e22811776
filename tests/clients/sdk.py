"""The `openai` SDK, every resource that kvrelay has."""

import json
from pathlib import Path

from tests.clients.report import Report, Site

SCRIPT = Path(__file__).with_name("sdk_script.py")


def openai(site: Site) -> list[Report]:
    said = site.run("python", SCRIPT, f"{site.url}/v1", site.model)
    return [Report(**json.loads(said.splitlines()[-1]))]
