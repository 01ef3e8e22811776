"""The load generators that people already use, each driven as its documentation says."""

import json

from tests.clients.report import Report, Site

REQUESTS, AT_ONCE, PROMPT_TOKENS, OUTPUT_TOKENS = 6, 2, 40, 12


def vllm(site: Site) -> list[Report]:
    """`vllm bench serve`, its three backends."""
    return [
        _vllm(site, backend, endpoint)
        for backend, endpoint in (
            ("openai", "/v1/completions"),
            ("openai-chat", "/v1/chat/completions"),
            ("openai-responses", "/v1/responses"),
        )
    ]


def _vllm(site: Site, backend: str, endpoint: str) -> Report:
    result = site.out / f"vllm-{backend}.json"
    site.run(
        *("vllm", "bench", "serve", "--backend", backend, "--base-url", site.url, "--endpoint", endpoint),
        *("--model", site.model, "--tokenizer", site.model_folder, "--dataset-name", "random"),
        *(
            "--random-input-len",
            str(PROMPT_TOKENS),
            "--random-output-len",
            str(OUTPUT_TOKENS),
            "--ignore-eos",
        ),
        *(
            "--num-prompts",
            str(REQUESTS),
            "--max-concurrency",
            str(AT_ONCE),
            "--ready-check-timeout-sec",
            "0",
        ),
        *("--save-result", "--result-filename", result),
    )
    found = json.loads(result.read_text())
    assert found["failed"] == 0, found
    return Report(found["completed"], found["total_input_tokens"], found["total_output_tokens"])


def sglang(site: Site) -> list[Report]:
    """`sglang.bench_serving`: the two OpenAI backends, and its own API."""
    return [_sglang(site, backend) for backend in ("vllm", "vllm-chat", "sglang")]


def _sglang(site: Site, backend: str) -> Report:
    result = site.out / f"sglang-{backend}.jsonl"
    # It counts a prompt itself unless a chunk tells it: what the template of a chat adds it does not know.
    usage = {} if backend == "sglang" else {"stream_options": {"continuous_usage_stats": True}}
    site.run(
        *("python", "-m", "sglang.bench_serving", "--backend", backend, "--base-url", site.url),
        *("--model", site.model, "--tokenizer", site.model_folder, "--dataset-name", "random-ids"),
        *("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)),
        *("--random-range-ratio", "1.0", "--num-prompts", str(REQUESTS), "--max-concurrency", str(AT_ONCE)),
        *("--warmup-requests", "0", "--output-file", result, "--output-details"),
        *("--extra-request-body", json.dumps(usage)),
    )
    found = json.loads(result.read_text())
    assert found["completed"] == REQUESTS, found
    return Report(found["completed"], sum(found["input_lens"]), found["total_output_tokens"])


def aiperf(site: Site) -> list[Report]:
    return [_aiperf(site, endpoint) for endpoint in ("chat", "completions")]


def _aiperf(site: Site, endpoint: str) -> Report:
    folder = site.out / f"aiperf-{endpoint}"
    site.run(
        *(
            "aiperf",
            "profile",
            "-m",
            site.model,
            "--url",
            site.url,
            "--endpoint-type",
            endpoint,
            "--streaming",
        ),
        *("--request-count", str(REQUESTS), "--concurrency", str(AT_ONCE), "--tokenizer", site.model_folder),
        *("--isl", str(PROMPT_TOKENS), "--osl", str(OUTPUT_TOKENS), "--extra-inputs", "ignore_eos:true"),
        *("--extra-inputs", f"min_tokens:{OUTPUT_TOKENS}", "--ui", "none", "--artifact-dir", folder),
    )
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    assert found["error_summary"] == [], found["error_summary"]
    return Report(
        round(found["request_count"]["avg"]),
        round(found["usage_prompt_tokens"]["sum"]),
        round(found["usage_completion_tokens"]["sum"]),
    )


def guidellm(site: Site) -> list[Report]:
    result = site.out / "guidellm.json"
    site.run(
        *("guidellm", "run", "--backend", f"kind=openai_http,target={site.url},model={site.model}"),
        *("--profile", f"kind=concurrent,streams={AT_ONCE}"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={site.model_folder}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
        *("--output", f"kind=json,path={result}", "--disable-console"),
    )
    (found,) = json.loads(result.read_text())["benchmarks"]
    metrics = found["metrics"]
    totals = metrics["request_totals"]
    assert totals["errored"] == totals["incomplete"] == 0, totals
    return [
        Report(
            totals["successful"],
            round(metrics["prompt_token_count"]["successful"]["total_sum"]),
            round(metrics["output_token_count"]["successful"]["total_sum"]),
        )
    ]
