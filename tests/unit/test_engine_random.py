"""Thousands of random commands over tiny pools: pages add up, texts are right, nothing hangs."""

import random
from functools import cache

import pytest
import torch

from relay.sampling import SamplingParams
from tests.engine_rig import (
    EOS,
    PAGE_SIZE,
    VOCAB,
    Rig,
    continuation,
    pool_rows,
    work,
)
from workers.engine.messages import (
    Drop,
    Ending,
    Event,
    Prebuilt,
    Prefill,
    Prefilled,
    Proven,
    Refused,
    Reserve,
    Reserved,
    Retracted,
    Sampled,
    Work,
)

LONGEST = 30


@cache
def answer(prompt: tuple[int, ...]) -> list[int]:
    return continuation(list(prompt), LONGEST)


class Client:
    """Plays control, transfer and output for one engine: submits, relays, resumes, drops."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.pages = self.draw.choice([5, 8, 13, 24])
        self.rig = Rig(
            pages=self.pages,
            chunk_tokens=self.draw.choice([4, 8, 30]),
            reserve_tokens=self.draw.choice([0, 1, 6]),
            group_layers=self.draw.choice([1, 2, 3]),
        )
        self.rig.engine._on_event = self.hear
        self.legs: dict[str, Work] = {}  # what the engine should know
        self.texts: dict[str, list[int]] = {}
        self.receiving: dict[str, Reserved] = {}
        self.relayed: set[str] = set()
        self.rooms: list[int] = []
        self.count = 0
        self.oldest_ms = 0.0
        self.retractions = 0
        self.spared_pages = 0
        self.ended = 0

    def new_work(
        self, emitted: int = 0, prompt: tuple[int, ...] | None = None, arrival_ms: float | None = None
    ) -> Work:
        self.count += 1
        if prompt is None:
            family = self.draw.randrange(3)  # shared prefixes
            length = self.draw.randint(1, self.pages * PAGE_SIZE // 2)
            prompt = tuple((family * 7 + i) % (VOCAB - 1) + 1 for i in range(length))
            if self.draw.random() < 0.5:
                prompt = (*prompt[:-1], self.draw.randrange(1, VOCAB))
        params = SamplingParams(max_tokens=LONGEST, temperature=0.0, ignore_eos=self.draw.random() < 0.7)
        return work(
            f"leg{self.count}",
            list(prompt),
            emitted=tuple(answer(prompt)[:emitted]),
            params=params,
            solo=self.draw.random() < 0.1,
            arrival_ms=float(self.count) if arrival_ms is None else arrival_ms,
        )

    def act(self) -> None:
        match self.draw.randrange(10):
            case 0 | 1 if len(self.legs) < 8:
                self.prefill(self.new_work(), relay=self.draw.random() < 0.4)
            case 2 | 3 if len(self.legs) < 8:
                leg = self.new_work()
                self.legs[leg.key] = leg
                self.rig.submit(Reserve(leg))
            case 4 | 5 if self.receiving:
                self.prebuild(self.draw.choice(sorted(self.receiving)))
            case 6 if self.legs:
                self.drop(self.draw.choice(sorted(self.legs)))
            case 7 if self.rooms:
                self.rig.submit(Proven(self.rooms.pop(self.draw.randrange(len(self.rooms)))))
            case 8:
                self.rig.submit(Drop("nobody"), Proven(-1))
            case _:
                pass

    def prefill(self, leg: Work, relay: bool) -> None:
        self.legs[leg.key] = leg
        if relay:
            self.relayed.add(leg.key)
        self.rig.submit(Prefill(leg, relay))

    def hear(self, event: Event) -> None:
        self.rig.events.append(event)
        if isinstance(event, Reserved) and event.key in self.legs:
            self.spared_pages += event.first_page
            self.write(event)

    def write(self, reserved: Reserved) -> None:
        """What a peer may write from the moment that the pages are its own."""
        leg = self.legs[reserved.key]
        tokens = [*leg.prompt_ids, *leg.emitted]
        for layer, (keys, values) in enumerate(pool_rows(tokens)):
            for position, (k, v) in enumerate(zip(keys, values)):
                page, offset = divmod(position, PAGE_SIZE)
                if page >= reserved.first_page:
                    target = reserved.pages[page - reserved.first_page]
                    self.rig.kv.tensor[layer, target, :, offset, 0, 0] = torch.tensor([k, v])

    def prebuild(self, key: str) -> None:
        del self.receiving[key]
        leg = self.legs[key]
        self.rig.submit(Prebuilt(key, Sampled(answer(leg.prompt_ids)[len(leg.emitted)])))

    def drop(self, key: str) -> None:
        quarantine = None
        if key in self.receiving and self.draw.random() < 0.5:
            self.count += 1
            quarantine = self.count
            self.rooms.append(quarantine)
        self.forget(key)
        self.rig.submit(Drop(key, quarantine))

    def forget(self, key: str) -> None:
        self.legs.pop(key)
        self.receiving.pop(key, None)
        self.relayed.discard(key)

    def step(self) -> bool:
        running = self.legs.keys() - self.relayed - self.receiving.keys()
        self.oldest_ms = min((self.legs[key].arrival_ms for key in running), default=0.0)
        if self.rig.late:
            self.rig.device.compute(self.draw.randrange(5))
        worked = self.rig.step()
        self.listen()
        return worked

    def listen(self) -> None:
        produced, self.rig.produced = self.rig.produced, []
        events, self.rig.events = self.rig.events, []
        for token in produced:
            assert token.key in self.legs, "a token after Drop or the end"
            leg = self.legs[token.key]
            text = self.texts.setdefault(token.key, list(leg.emitted))
            assert token.position == len(text)
            text.append(token.sampled.token_id)
            assert text == answer(leg.prompt_ids)[: len(text)]
            self.judge(leg, text, token.ending)
        for event in events:
            match event:
                case Reserved():
                    if event.key in self.legs:
                        self.receiving[event.key] = event
                case Refused():
                    self.legs.pop(event.key, None)
                case Prefilled() if event.key in self.relayed:
                    leg = self.legs[event.key]
                    assert event.first.token_id == answer(leg.prompt_ids)[len(leg.emitted)]
                case Retracted():
                    self.resume(event.key)

    def judge(self, leg: Work, text: list[int], ending: Ending | None) -> None:
        full = len(leg.prompt_ids) + len(text) >= self.pages * PAGE_SIZE
        stopped = text[-1] == EOS and not leg.params.ignore_eos
        expected = Ending.STOP if stopped else Ending.LENGTH if full or len(text) == LONGEST else None
        assert ending == expected
        if ending is not None:
            self.ended += 1
            self.forget(leg.key)

    def resume(self, key: str) -> None:
        """A retracted leg comes back with what it has emitted."""
        self.retractions += 1
        leg = self.legs[key]
        assert leg.arrival_ms > self.oldest_ms, "the oldest was retracted"
        self.forget(key)
        emitted = len(self.texts.get(key, leg.emitted))
        self.prefill(self.new_work(emitted, leg.prompt_ids, leg.arrival_ms), relay=False)

    def wind_down(self) -> None:
        """All that peers and control owe is delivered; everything must then end by itself."""
        for _ in range(2000):
            worked = self.step()
            for key in sorted(self.receiving):
                self.prebuild(key)
            for room in self.rooms:
                self.rig.submit(Proven(room))
            self.rooms.clear()
            for key in sorted(self.relayed & self.legs.keys()):
                if self.draw.random() < 0.5:
                    self.drop(key)
            if not worked and not self.legs:
                break
        else:
            raise AssertionError(f"these legs never ended: {sorted(self.legs)}")
        self.rig.run()


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_random_commands(late: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rig, "late", late)
    client = Client(seed)
    for _ in range(200):
        client.act()
        if client.draw.random() < 0.8:
            client.step()
    client.wind_down()
    headroom = client.rig.engine.headroom
    assert (headroom.held_pages, headroom.quarantined_pages, headroom.waiting, headroom.running) == (
        0,
        0,
        0,
        0,
    )
    assert headroom.free_pages + headroom.cached_pages == client.pages
    assert client.ended > 0
    assert client.rig.engine.stats.spared_tokens == client.spared_pages * PAGE_SIZE
