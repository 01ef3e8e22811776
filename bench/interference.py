"""A steady stream while long prompts arrive: what disaggregation is for."""

import random
import threading
import time
from contextlib import ExitStack

from app.measure.table import middle, percentile, show
from bench import client, machine
from bench.serving import LAYOUTS
from bench.system import System

SECONDS = 30.0
LONG_TOKENS = 4000
EVERY_S = 10.0


def run() -> None:
    rows = []
    for layout, env in LAYOUTS.items():
        with System(**env) as system:
            alone = _phase(system.url, long_prompts=False)
            disturbed = _phase(system.url, long_prompts=True)
        p99_alone, p99_disturbed = percentile(alone, 0.99), percentile(disturbed, 0.99)
        rows.append(
            (
                layout,
                *(middle(alone), p99_alone, max(alone)),
                *(middle(disturbed), p99_disturbed, max(disturbed)),
                p99_disturbed / p99_alone,
            )
        )
    show(
        f"One stream, {SECONDS:.0f} s, {LONG_TOKENS}-token prompts every {EVERY_S:.0f} s "
        "(goal: p99 ratio <= 1.3 with a decode worker)",
        ("layout", "ITL ms alone", "p99", "max", "ITL ms disturbed", "p99", "max", "p99 ratio"),
        rows,
    )


def _phase(url: str, long_prompts: bool) -> list[float]:
    """Gaps in ms between the tokens of the steady stream during SECONDS."""
    rng = random.Random(3)
    stop = threading.Event()

    def prompts() -> None:
        while not stop.wait(0 if long_prompts else SECONDS):
            with client.connect(url) as http:
                threading.Thread(
                    target=client.stream,
                    args=(client.connect(url), client.random_prompt(rng, LONG_TOKENS), 1),
                ).start()
                http.close()
            if stop.wait(EVERY_S):
                return

    with ExitStack() as stack:
        http = stack.enter_context(client.connect(url))
        body = {
            "prompt": client.random_prompt(rng, 128),
            "max_tokens": 4000,
            "temperature": 0,
            "ignore_eos": True,
        }
        request_id = http.post("/v1/requests", json=body).raise_for_status().json()["id"]
        stack.callback(lambda: http.delete(f"/v1/requests/{request_id}"))
        stack.callback(stop.set)
        gaps, last, began = [], 0.0, 0.0
        with http.stream("GET", f"/v1/requests/{request_id}/stream") as response:
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                now = time.perf_counter()
                if not began:
                    began = last = now
                    if long_prompts:
                        threading.Thread(target=prompts, daemon=True).start()
                    continue
                gaps.append(1e3 * (now - last))
                last = now
                if now - began > SECONDS:
                    break
    return gaps


if __name__ == "__main__":
    print(machine.name())
    run()
