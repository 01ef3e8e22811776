"""lm-eval over /v1/completions: the same log likelihoods, and so the same score, as `transformers`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.clients.report import Report, Site

QUESTIONS = Path(__file__).with_name("capitals.jsonl")
TASK = """\
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


def lm_eval(site: Site) -> list[Report]:
    tasks = site.out / "tasks"
    tasks.mkdir(exist_ok=True)
    (tasks / "capitals.yaml").write_text(TASK.format(questions=QUESTIONS))
    arguments = {
        "base_url": f"{site.url}/v1/completions",
        "model": site.model,
        "tokenizer": str(site.model_folder),
        "tokenizer_backend": "huggingface",
        "num_concurrent": "2",
        "max_length": "2048",
    }
    site.run(
        *("lm_eval", "--model", "local-completions", "--include_path", tasks, "--tasks", "capitals"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *("--output_path", "lm-eval", "--log_samples"),
    )
    (samples,) = (site.out / "lm-eval").rglob("samples_*.jsonl")
    (results,) = (site.out / "lm-eval").rglob("results_*.json")
    found = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    ours = [[float(likelihood) for likelihood, _ in sample["filtered_resps"]] for sample in found]
    questions = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
    theirs, prompt_tokens = _in_transformers(site.model_folder, questions)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, abs=1e-3)
    right = [max(range(3), key=scores.__getitem__) == q["label"] for scores, q in zip(theirs, questions)]
    score = json.loads(results.read_text())["results"]["capitals"]["acc,none"]
    assert score == pytest.approx(sum(right) / len(right))
    asked = sum(len(question["choices"]) for question in questions)
    return [Report(asked, prompt_tokens, asked)]  # each is answered with the one token that lm-eval asks for


@torch.inference_mode()
def _in_transformers(folder: Path, questions: list[dict[str, Any]]) -> tuple[list[list[float]], int]:
    """Log likelihood of each choice of each question, and how many tokens were read for it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found, tokens = [], 0
    for question in questions:
        begin = f"The capital of {question['country']} is"
        scores = []
        for choice in question["choices"]:
            ids = tokenizer(f"{begin} {choice}")["input_ids"]
            tokens += len(ids)
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            start = len(tokenizer(begin)["input_ids"])
            scores.append(sum(float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids))))
        found.append(scores)
    return found, tokens
