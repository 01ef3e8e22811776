"""`kvrelay bench`."""

import json
import os
import random
import sys
from typing import NamedTuple

import click
from tqdm import tqdm

from app.commands.api_client import ApiClient, refusal
from app.commands.options import gateway, no_color
from app.measure.closed_loop import closed_loop
from app.measure.completion import Completed, Refused, complete
from app.measure.table import middle, percentile, show

_ORDINARY = range(1_000, 20_000)  # token ids that nearly every vocabulary has


class Row(NamedTuple):
    clients: int
    requests: int
    seconds: float
    ttft_ms: float
    ttft_p99_ms: float
    itl_ms: float
    itl_p99_ms: float
    tokens_per_s: float


_HEADER = ("clients", "requests", "seconds", "TTFT ms", "p99", "ITL ms", "p99", "tokens/s")


@click.command()
@click.option(
    "-c",
    "--clients",
    default=(1, 4, 16),
    multiple=True,
    type=click.IntRange(1, 1_000),
    show_default=True,
    help="Requests at a time; may be repeated.",
)
@click.option("-n", "--requests", type=click.IntRange(1), help="For each of these; default: 3 per client.")
@click.option("--input-tokens", default=512, type=click.IntRange(1), show_default=True)
@click.option("--output-tokens", default=128, type=click.IntRange(1), show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the random prompts.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
@gateway
@no_color
def bench(
    client: ApiClient,
    clients: tuple[int, ...],
    requests: int | None,
    input_tokens: int,
    output_tokens: int,
    seed: int,
    as_json: bool,
) -> int:
    """Measure a running server: latencies and tokens per second.

    Random prompts, streamed over HTTP, a new request whenever one has ended. Any server that speaks OpenAI's
    API can be measured. Run it on another machine than the server's, or it takes part of what it measures.

    \b
    Examples:
      kvrelay bench
      kvrelay bench --url http://gpu-1:8000 -c 8 -c 64 --input-tokens 4000 --output-tokens 256
    """
    model = client.get("/v1/models")["data"][0]["id"]

    def ask(prompt: list[int]) -> Completed:
        completed = complete(client.base_url, model, prompt, output_tokens, client.key)
        bar.update()
        return completed

    counts = [requests or 3 * each for each in clients]
    rng = random.Random(seed)
    rows = []
    with tqdm(total=1 + sum(counts), unit="request", file=sys.stderr, disable=None, leave=False) as bar:
        try:
            ask([rng.choice(_ORDINARY) for _ in range(input_tokens)])  # the first request connects
            for each, count in zip(clients, counts):
                prompts = [[rng.choice(_ORDINARY) for _ in range(input_tokens)] for _ in range(count)]
                seen = closed_loop(ask, prompts, output_tokens, each)
                first_ms, gaps_ms = [1e3 * s for s in seen.first_s], [1e3 * s for s in seen.gaps_s]
                times_ms = (
                    middle(first_ms),
                    percentile(first_ms, 0.99),
                    middle(gaps_ms),
                    percentile(gaps_ms, 0.99),
                )
                rows.append(Row(each, count, seen.seconds, *times_ms, seen.tokens / seen.seconds))
        except Refused as refused:
            raise refusal(refused.status, refused.body) from None
        except RuntimeError as error:
            raise click.ClickException(str(error)) from None
        except KeyboardInterrupt:
            os._exit(130)  # not when every thread has its answer
    if as_json:
        click.echo(json.dumps([row._asdict() for row in rows], indent=2))
    else:
        show(f"{model} at {client.base_url}, {input_tokens} tokens in, {output_tokens} out", _HEADER, rows)
    return 0
