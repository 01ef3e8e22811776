"""The `llm` command line."""

from tests.clients.report import Report, Site

PROMPT = "Name three primary colors."


def llm(site: Site) -> list[Report]:
    folder = site.out / ".config" / "io.datasette.llm"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "extra-openai-models.yaml").write_text(
        f"- model_id: kvrelay\n  model_name: {site.model}\n  api_base: {site.url}/v1\n  api_key_name: none\n"
    )
    for more in ([], ["--no-stream"]):
        said = site.run("llm", "--key", "none", "-m", "kvrelay", "-o", "temperature", "0", *more, PROMPT)
        assert "Red" in said, said
    return [Report(2, -1, -1)]
