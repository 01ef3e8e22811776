"""What `python -m bench peers` concludes from turns, and that it leaves nothing behind."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from app.measure.closed_loop import Seen
from app.measure.completion import Miscounted, complete
from bench import keeper
from bench.peers.cores import Cores
from bench.peers.goal import Goal
from bench.peers.load import Load, SeenSteady
from bench.peers.options import parse, peers
from bench.peers.places import absent
from bench.peers.plot import plot
from bench.peers.ratio import Ratio
from bench.peers.report import report
from bench.peers.results import Results, loads, of, systems
from bench.peers.turn import STEADY, Turn, load_numbers, steady_numbers


def turn(system: str, repetition: int, tokens_s: float, run: str = "a", clients: int = 1) -> Turn:
    return Turn(run, repetition, system, clients, {"tokens_s": tokens_s})


def test_a_ratio_is_of_medians_and_its_spread_of_neighbours() -> None:
    ours = [turn("kvrelay", 0, 10.0), turn("kvrelay", 1, 30.0), turn("kvrelay", 2, 20.0)]
    theirs = [turn("vllm", 0, 10.0), turn("vllm", 1, 10.0), turn("vllm", 2, 5.0)]
    assert Ratio.of(ours, theirs, "tokens_s") == Ratio(20.0, 10.0, 2.0, low=1.0, high=4.0, pairs=3)


def test_turns_of_different_runs_are_no_pair() -> None:
    ours, theirs = [turn("kvrelay", 0, 10.0, run="a")], [turn("vllm", 0, 5.0, run="b")]
    assert Ratio.of(ours, theirs, "tokens_s") is None
    assert Ratio.of(ours, [turn("vllm", 0, 5.0)], "first_s") is None


def test_goals_have_a_direction() -> None:
    faster = Goal("kvrelay", "vllm", 1, "tokens_s", 2.5)
    sooner = Goal("kvrelay", "vllm", 1, "first_s", 0.85, at_least=False)
    assert faster.met(2.5)
    assert not faster.met(2.4)
    assert sooner.met(0.85)
    assert not sooner.met(0.9)


def full_turn(system: str, repetition: int, factor: float, clients: int = 1) -> Turn:
    """All numbers of a turn under load."""
    numbers = load_numbers(
        Seen(seconds=1.0, tokens=round(100 * factor), first_s=[0.5 / factor], gaps_s=[0.01])
    )
    return Turn("a", repetition, system, clients, numbers, {"worker": 5.0})


def steady_turn(system: str, ratio: float) -> Turn:
    numbers = {"steady_p99_ms": 10.0, "disturbed_p99_ms": 10.0 * ratio, "disturbed_ratio": ratio}
    return Turn("a", 0, system, STEADY, numbers)


def test_the_report_shows_ratios_with_their_spread_and_goals(capsys: pytest.CaptureFixture[str]) -> None:
    report(
        [
            *(full_turn("vllm", repetition, 1.0) for repetition in range(3)),
            *(full_turn("kvrelay", repetition, factor) for repetition, factor in enumerate((2.0, 3.0, 4.0))),
            steady_turn("kvrelay-1p1d", 1.25),
        ]
    )
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("kvrelay / vllm 1 3.00 (2.00 to 4.00) 0.33 (0.25 to 0.50)") for line in lines)
    assert "tokens_s, kvrelay / vllm, 1 ≥ 2.5 3.00 (2.00 to 4.00) yes" in lines
    assert "disturbed_ratio, kvrelay-1p1d ≤ 1.15 1.25 (1.25 to 1.25) no" in lines


def test_the_plot_shows_every_system(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "peers.svg"
    turns = [full_turn(system, 0, 1.0, clients) for system in ("vllm", "kvrelay") for clients in (1, 8)]
    plot([*turns, steady_turn("kvrelay", 1.0)], picture, "here")
    text = picture.read_text()
    assert all(name in text for name in (">vllm<", ">kvrelay<", ">here<"))


def test_each_run_adds_to_the_results(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    Results(path).add(turn("vllm", 0, 5.0, clients=8))
    Results(path).add(turn("kvrelay", 0, 10.0, clients=4))
    turns = Results(path).turns
    assert systems(turns) == ["vllm", "kvrelay"]
    assert loads(turns) == [4, 8]
    assert of(turns, "kvrelay", 4) == [turn("kvrelay", 0, 10.0, clients=4)]
    assert of(turns, "kvrelay", 8) == []


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    path.write_text('{"some": "thing"}')
    with pytest.raises(ValueError, match="--results"):
        Results(path)


def test_a_steady_stream_is_compared_with_itself() -> None:
    numbers = steady_numbers(SeenSteady([0.01] * 100, [0.01] * 90 + [0.03] * 10))
    assert numbers == {"steady_p99_ms": 10.0, "disturbed_p99_ms": 30.0, "disturbed_ratio": 3.0}


def test_prompts_follow_from_the_seed() -> None:
    load = Load.of(4, prompt_tokens=8, output_tokens=2, seed=1)
    assert load.requests == 12
    assert load.prompts() == load.prompts()
    assert load.prompts() != load._replace(seed=2).prompts()


def test_two_workers_share_the_cores() -> None:
    assert Cores.parse("0,1,2").halves() == (Cores((0,)), Cores((1, 2)))
    assert Cores.parse("3").halves() == (Cores((3,)), Cores((3,)))


def test_what_is_not_here_is_named(tmp_path: Path) -> None:
    assert absent("vllm", tmp_path) is None
    assert "--vllm or PEER_VLLM" in (absent("vllm", None) or "")
    assert str(tmp_path / "bin/vllm") in (absent("vllm", tmp_path, "bin/vllm") or "")
    nothing = [f"--{place}={tmp_path}" for place in ("model", "gguf", "vllm", "llama", "transformers")]
    found = peers(parse([*nothing, "--systems", "vllm", "kvrelay-1p1d", "transformers"]))
    assert [peer.name for peer in found] == ["vllm", "transformers", "kvrelay-1p1d"]
    assert all(peer.missing() for peer in found)


@contextmanager
def server(events: list[dict[str, object]]) -> Iterator[str]:
    """Answers every completion with these events."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            for event in events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def chunk(text: str, finish_reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"text": text, "finish_reason": finish_reason}]}


def usage(prompt: int, completion: int) -> dict[str, object]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


def test_chunks_with_tokens_are_timed_and_the_count_is_checked() -> None:
    with server([chunk("a"), chunk(""), chunk("b"), chunk("", "length"), usage(2, 3)]) as url:
        assert len(complete(url, "m", [1, 2], 3).gaps_s) == 2
    with server([chunk("a"), chunk("b"), usage(2, 2)]) as url, pytest.raises(Miscounted):
        complete(url, "m", [1, 2], 3)
    with server([{"error": {"message": "no"}}]) as url, pytest.raises(RuntimeError, match="no"):
        complete(url, "m", [1, 2], 3)


def test_a_kept_command_ends_with_who_holds_its_stdin() -> None:
    """And so does what the command started."""
    inner = "import subprocess as s, time; print(s.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    kept = subprocess.Popen(
        [sys.executable, keeper.__file__, sys.executable, "-c", inner],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert kept.stdin is not None
    assert kept.stdout is not None
    sleeper = psutil.Process(int(kept.stdout.readline()))
    kept.stdin.close()
    kept.wait(30)
    deadline = time.monotonic() + 30
    while sleeper.is_running() and sleeper.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)
