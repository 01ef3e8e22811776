"""Hand-over latencies of an idle system, and how much of the transfer compute hides."""

import random
import time

from app.measure.table import middle, percentile, show
from bench import client, machine
from bench.system import System

REQUESTS = 30
PROMPTS_TOKENS = (128, 512, 1000, 2000, 4000)
REPEATS = 5


def run() -> None:
    rng = random.Random(1)
    with System(PREFILL_WORKERS="1", DECODE_WORKERS="1") as system, client.connect(system.url) as http:
        _claims(http, rng)
        _transfers(http, rng)


def _claims(http: "client.httpx.Client", rng: random.Random) -> None:
    claimed_ms, joined_ms, steps_ms = [], [], []
    for _ in range(REQUESTS):
        streamed = client.stream(http, client.random_prompt(rng, 64), 16)
        record = client.record(http, streamed.request_id)
        ledger = record["ledger"]
        claimed_ms.append(ledger["queued"])
        first_at = streamed.at[0] * 1e3
        # The first token came with the KV; the second is the first decode step.
        joined_ms.append(ledger["admit"] + streamed.at[1] * 1e3 - first_at)
        steps_ms += [gap * 1e3 for gap in streamed.gaps_s[1:]]
        time.sleep(0.05)
    step_ms = middle(steps_ms)
    show(
        f"Hand-over on an idle system, {REQUESTS} requests "
        "(goals: claimed <= 10 ms, joined <= one step + 5 ms)",
        ("from - to", "median ms", "p99 ms"),
        [
            ("submit - prefill claimed", middle(claimed_ms), percentile(claimed_ms, 0.99)),
            ("KV-ready - first decode step emitted", middle(joined_ms), percentile(joined_ms, 0.99)),
            ("one decode step, batch 1", step_ms, percentile(steps_ms, 0.99)),
            ("KV-ready - first decode step, less one step", middle(joined_ms) - step_ms, float("nan")),
        ],
    )


def _transfers(http: "client.httpx.Client", rng: random.Random) -> None:
    rows = []
    for tokens in PROMPTS_TOKENS:
        ledgers = []
        for _ in range(REPEATS):
            streamed = client.stream(http, client.random_prompt(rng, tokens), 2)
            ledgers.append(client.record(http, streamed.request_id)["ledger"])
        prefill_ms = middle([ledger["prefill"] for ledger in ledgers])
        exposed_ms = middle([ledger["transfer"]["exposed_ms"] for ledger in ledgers])
        size = ledgers[0]["transfer"]["bytes"]
        pieces = middle([float(ledger["transfer"]["descriptors"]) for ledger in ledgers])
        share = 100 * exposed_ms / prefill_ms
        rows.append((tokens, prefill_ms, exposed_ms, share, size / 1e6, pieces))
    show(
        f"Transfer that compute does not hide, medians of {REPEATS} "
        "(goal: <= 10 % of prefill from 1,000 tokens on)",
        ("prompt tokens", "prefill ms", "exposed ms", "exposed %", "MB", "descriptors"),
        rows,
    )


if __name__ == "__main__":
    print(machine.name())
    run()
