"""The page of one request in a browser: its relay as lanes, its text, and how it ends."""

import re

from playwright.sync_api import Page, expect

from relay.answers import Prefilled, Transfer
from relay.request import Finish, Leg, Why
from relay.rooms import Rooms
from relay.stamps import Stamps
from relay.stretches import Stretch
from tests.gateway_rig import GatewayProcess, ScriptedWorker, default_tokenizer, words

LANES = [
    *(
        "Accept",
        "Queued",
        "Bootstrap",
        "Queued",
        "Reserve",
        "Wait for a step",
        "Prefill",
        "Chunks",
        "Transfer",
    ),
    *("Layer groups", "Seal", "Admit", "Decode"),
]
MB = 1_000_000


def submit(gateway: GatewayProcess) -> str:
    reply = gateway.call("POST", "/v1/requests", {"prompt": "Once upon a time"})
    assert reply.status == 202, reply.raw
    return str(reply.body["id"])


def test_the_relay_of_a_request(page: Page, gateway: GatewayProcess, rooms: Rooms) -> None:
    told = words(default_tokenizer(), " there was a relay.")
    with ScriptedWorker(rooms, "prefill") as prefill, ScriptedWorker(rooms, "decode") as decode:
        request_id = submit(gateway)
        page.goto(f"{gateway.url}/console/requests/{request_id}")
        lanes = page.locator(".lane")
        expect(page.locator(".lane[data-name=queued] i.open")).to_have_count(1)
        p, d = prefill.claim(Leg.PREFILL), decode.claim(Leg.DECODE)
        assert rooms.publish(d.hold, p.room, [1, 2], 0).ok
        # Long enough that what is told of it below has passed.
        expect(page.locator(".lane[data-name=prefill] .time")).to_have_text(re.compile(r"\d\d\d ms|\d s"))
        begun = p.clock.server_ms
        chunks = tuple(Stretch(begun + at, begun + at + 40, 512) for at in (0, 40))
        sends = tuple(
            Stretch(begun + at, begun + at + 2, MB, first, first + 6) for at, first in ((40, 0), (80, 6))
        )
        seal = Stretch(begun + 83, begun + 84, 320)
        stamps = Stamps(0, begun + 1, chunks, (*sends, seal))
        assert rooms.kv_ready(p.hold, p.room, Prefilled(stamps), Transfer(4000, 2 * MB, 4, MB)).ok
        decode.emit(d, told[:2])
        expect(page.locator("#answer-text")).to_have_text("there was")
        expect(page.locator("#state")).to_have_text("decode")
        decode.emit(d, told[2:], Finish("stop"))
    expect(page.locator("#state")).to_have_text("finished")
    expect(page.locator("#answer-text")).to_have_text("there was a relay.")
    expect(page.locator("#facts")).to_contain_text("2.0 MB, 4.0 ms exposed, 1.0 MB were there")
    expect(page.get_by_role("button", name="Cancel")).to_be_hidden()

    expect(lanes.last.locator(".what")).to_have_text("Decode")
    titles = lanes.locator(".what").evaluate_all("all => all.map(each => each.firstChild.data)")
    assert sorted(titles) == sorted(LANES)
    assert titles.index("Chunks") == titles.index("Prefill") + 1
    for lane in lanes.all():
        bars = lane.locator(".track i")
        assert bars.count() >= 1
        assert bars.first.evaluate("bar => bar.offsetWidth >= 2 && bar.offsetLeft >= 0")
    expect(page.locator(".lane[data-name=chunk] .track i")).to_have_count(2)

    sends_lane = page.locator(".lane[data-name=send]")
    sends_lane.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(sends_lane.locator("tbody tr").first).to_contain_text("1.0 MB · layers 0-5 · 500 MB/s")
    whole = page.locator(".lane[data-name=decode] .track i")
    before = whole.evaluate("bar => bar.offsetLeft")
    page.get_by_role("radio", name="to first token").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("radio", name="all")).to_be_checked()
    assert whole.evaluate("bar => bar.offsetLeft") <= before
    expect(sends_lane).to_have_attribute("open", "")


def test_each_attempt_has_lanes_of_its_own(
    page: Page, gateway: GatewayProcess, worker: ScriptedWorker, rooms: Rooms
) -> None:
    request_id = submit(gateway)
    page.goto(f"{gateway.url}/console/requests/{request_id}")
    assert rooms.release(worker.claim().hold, Why.DRAIN).ok
    worker.claim()
    expect(page.locator(".attempt h3")).to_have_text(["Attempt 1", "Attempt 2"])
    expect(page.locator(".lane[data-name=released] .track i")).to_have_attribute(
        "title", "Released: 0.00 ms, leg decode · why drain"
    )


def test_an_open_request_is_cancelled(page: Page, gateway: GatewayProcess, worker: ScriptedWorker) -> None:
    request_id = submit(gateway)
    page.goto(f"{gateway.url}/console/requests/{request_id}")
    worker.claim()
    page.get_by_role("button", name="Cancel the request").click()
    expect(page.locator("#state")).to_have_text("cancelled")
    expect(page.locator("#no-text")).to_have_text("It wrote no text.")
    assert gateway.call("GET", f"/v1/requests/{request_id}").body["status"] == "cancelled"
