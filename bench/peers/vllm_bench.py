"""`vllm bench serve`, as it comes, in the place of our client."""

import json
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from app.measure.closed_loop import Seen
from bench.peers.load import Load
from bench.peers.offline import OFFLINE


class VllmBench:
    def __init__(self, venv: Path, model: Path) -> None:
        """`venv` holds vLLM, `model` the tokenizer."""
        self._venv = venv
        self._model = model

    def run(self, url: str, name: str, load: Load) -> Seen:
        """Raises CalledProcessError, or RuntimeError when not all requests were completed."""
        address = urlsplit(url)
        with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as folder:
            command = [
                *(str(self._venv / "bin/vllm"), "bench", "serve", "--backend", "openai", "--disable-tqdm"),
                *("--host", str(address.hostname), "--port", str(address.port)),
                *("--model", name, "--tokenizer", str(self._model)),
                *("--dataset-name", "random", "--random-input-len", str(load.prompt_tokens)),
                *("--random-output-len", str(load.output_tokens), "--ignore-eos", "--temperature", "0"),
                *("--max-concurrency", str(load.clients), "--num-prompts", str(load.requests)),
                *("--seed", str(load.seed), "--save-result", "--save-detailed"),
                *("--result-dir", folder, "--result-filename", "result.json"),
            ]
            subprocess.run(command, env=OFFLINE, check=True, capture_output=True)
            result = json.loads((Path(folder) / "result.json").read_text())
        if result["completed"] != load.requests or result["failed"]:
            raise RuntimeError(f"{url} completed {result['completed']} of {load.requests} requests")
        gaps_s = [gap for gaps in result["itls"] for gap in gaps]
        return Seen(result["duration"], result["total_output_tokens"], result["ttfts"], gaps_s)
