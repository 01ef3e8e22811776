"""The page /console in a browser: pools, requests, a prompt that streams, and what goes wrong."""

import re

import pytest
from playwright.sync_api import Browser, Page, expect

from relay.request import Finish, Token
from relay.rooms import Rooms
from relay.tokenizer import Tokenizer
from tests.browser_rig import watched_page
from tests.gateway_rig import LOAD, GatewayProcess, ScriptedWorker, default_tokenizer, words
from tests.servers import RedisServer

HOSTILE = ' <img src="x" onerror="window.wrong = 1"><script>window.wrong = 1</script> & more'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return default_tokenizer()


@pytest.fixture
def told(tokenizer: Tokenizer) -> list[Token]:
    return words(tokenizer, " Air scatters the blue of light more than the red.")


def overview(page: Page, gateway: GatewayProcess) -> None:
    page.goto(f"{gateway.url}/console")
    expect(page.locator("#pulse")).to_have_text("live")


def send(page: Page, prompt: str) -> None:
    page.get_by_role("textbox", name="Prompt").fill(prompt)
    page.get_by_role("button", name="Send").click()


def test_pools_are_shown_as_they_are_now(page: Page, gateway: GatewayProcess, rooms: Rooms) -> None:
    overview(page, gateway)
    expect(page.locator("#pools")).to_contain_text(
        "No prefill worker lives. Start one: kvrelay worker --role prefill"
    )
    expect(page.locator("#no-requests")).to_be_visible()
    with ScriptedWorker(rooms, "prefill") as prefill, ScriptedWorker(rooms, "decode"):
        column = page.locator(".column[data-role=prefill]")
        expect(column.locator(".worker")).to_contain_text("0 running · 8 slots free")
        busy = LOAD._replace(running=3, free_pages=100, held_pages=120, cached_pages=30, quarantined_pages=6)
        prefill.show(load=busy)
        expect(column.locator(".worker")).to_contain_text("3 running · 8 slots free")
        expect(column.get_by_role("img")).to_have_attribute(
            "aria-label", "Of 256 pages: 120 held · 30 cached · 6 quarantined · 100 free"
        )
        page.wait_for_function(  # they move there
            """() => {
                const bars = document.querySelectorAll(".column[data-role=prefill] .pages i");
                const [held, cached, quarantined, free] = [...bars].map(bar => bar.offsetWidth);
                return held > free && free > cached && cached > quarantined && quarantined > 0;
            }"""
        )
        assert gateway.call("POST", "/v1/requests", {"prompt": "Once"}).status == 202
        expect(column.locator(".queue")).to_contain_text("1 queued · next waits")
        expect(page.locator("#requests tr")).to_contain_text("queued")
    expect(column.locator(".empty")).to_be_visible()


def test_a_prompt_streams_to_its_end(
    page: Page, gateway: GatewayProcess, worker: ScriptedWorker, told: list[Token], tokenizer: Tokenizer
) -> None:
    overview(page, gateway)
    send(page, "Why is the sky blue?")
    claimed = worker.claim()
    assert "user\nWhy is the sky blue?" in tokenizer.decode(list(claimed.prompt_ids))
    worker.emit(claimed, told[:3])
    expect(page.locator("#answer-text")).to_have_text("".join(token.text for token in told[:3]))
    expect(page.locator("#answer-status")).to_contain_text("3 tokens")
    row = page.locator("#requests tr").first
    expect(row).to_contain_text("decode")
    worker.emit(claimed, told[3:], Finish("stop"))
    expect(page.locator("#answer-text")).to_have_text("".join(token.text for token in told))
    expect(page.locator("#answer-status")).to_contain_text(f"finished · {len(told)} tokens")
    expect(page.locator("#answer-said")).to_contain_text("the red.")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(row).to_contain_text("finished")
    expect(row).to_contain_text(f"{len(claimed.prompt_ids)} → {len(told)}")


def test_stop_ends_the_request(
    page: Page, gateway: GatewayProcess, worker: ScriptedWorker, told: list[Token]
) -> None:
    overview(page, gateway)
    send(page, "Why?")
    claimed = worker.claim()
    worker.emit(claimed, told[:2])
    expect(page.locator("#answer-status")).to_contain_text("2 tokens")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#answer-status")).to_contain_text("cancelled · 2 tokens")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_what_cannot_be_sent_is_said_at_its_field(
    page: Page, gateway: GatewayProcess, worker: ScriptedWorker
) -> None:
    overview(page, gateway)
    page.get_by_label("Most tokens").fill("1000000")
    send(page, "Why?")
    expect(page.locator("#refusal")).to_contain_text("1000000")
    page.get_by_label("Most tokens").fill("8")
    worker.close()
    send(page, "Why?")
    expect(page.locator("#refusal")).to_contain_text("worker is alive")


def test_texts_of_others_stay_texts(
    page: Page, gateway: GatewayProcess, rooms: Rooms, worker: ScriptedWorker, tokenizer: Tokenizer
) -> None:
    worker.show(name=f"{HOSTILE}@{HOSTILE}")
    overview(page, gateway)
    expect(page.locator(".worker .name")).to_have_text(HOSTILE.strip())
    send(page, HOSTILE)
    hostile = words(tokenizer, HOSTILE)
    worker.emit(worker.claim(), hostile, Finish("stop"))
    expect(page.locator("#answer-text")).to_have_text(HOSTILE.strip())
    expect(page.locator("#answer-status")).to_contain_text("finished")
    page.get_by_role("link", name="See its relay").click()
    expect(page.locator("#answer-text")).to_have_text(HOSTILE.strip())
    assert page.evaluate("window.wrong") is None
    page.goto(f"{gateway.url}/console/requests/%3Cimg%20src=x%20onerror=alert(1)%3E")
    expect(page.get_by_role("heading", level=1)).to_have_text("<img src=x onerror=alert(1)>")
    expect(page.locator("#notice")).to_contain_text("There is no request")


def test_redis_goes_and_comes_back(
    page: Page, gateway: GatewayProcess, server: RedisServer, rooms: Rooms
) -> None:
    overview(page, gateway)
    server.kill()
    expect(page.locator("#notice")).to_contain_text("Redis cannot be reached.")
    expect(page.locator("#pulse")).to_have_text("away")
    server.start()
    expect(page.locator("#pulse")).to_have_text("live")
    expect(page.locator("#notice")).to_be_hidden()


def test_half_an_answer_is_not_lost(page: Page, gateway: GatewayProcess) -> None:
    """The pools came, the list did not: what is then said to be unchanged is what came before."""
    page.route("**/v1/requests?*", lambda route: route.fulfill(status=503, json={}), times=1)
    overview(page, gateway)
    expect(page.locator("#pools")).to_contain_text("No prefill worker lives.")


def test_durations_are_what_people_read(page: Page, gateway: GatewayProcess) -> None:
    overview(page, gateway)
    shown = page.evaluate(
        "async () => [0.994, 9.96, 999.6, 9996, 59_949, 59_951, 3_599_400, 3_599_600]"
        ".map((await import('/console/static/units.js')).duration)"
    )
    assert shown == ["0.99 ms", "10 ms", "1.00 s", "10.0 s", "59.9 s", "1 m 0 s", "59 m 59 s", "1 h 0 m"]


def test_a_hidden_page_asks_nothing(page: Page, gateway: GatewayProcess) -> None:
    overview(page, gateway)

    def hide(hidden: str) -> None:
        page.evaluate(
            f"Object.defineProperty(document, 'hidden', {{configurable: true, get: () => {hidden}}});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )

    hide("true")
    expect(page.locator("#pulse")).to_have_text("paused")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(1_500)
    assert asked == []
    hide("false")
    expect(page.locator("#pulse")).to_have_text("live")


def test_the_list_grows_where_that_is_wanted(
    page: Page, gateway: GatewayProcess, rooms: Rooms, worker: ScriptedWorker
) -> None:
    samples = gateway.call("POST", "/v1/requests", {"prompt": "Once", "n": 25}).body["samples"]
    overview(page, gateway)
    expect(page.locator("#requests tr")).to_have_count(20)
    page.get_by_role("button", name="Show older ones").click()
    for sample in samples:
        expect(page.locator("#requests").get_by_role("link", name=sample["id"], exact=True)).to_be_attached()


def test_a_request_is_opened_by_its_id(page: Page, gateway: GatewayProcess, worker: ScriptedWorker) -> None:
    samples = gateway.call("POST", "/v1/requests", {"prompt": "Once", "n": 21}).body["samples"]
    first = samples[0]["id"]
    overview(page, gateway)
    box = page.get_by_role("searchbox", name="Open a request by its id")
    box.press("Enter")
    box.fill("  ")
    box.press("Enter")
    expect(page).to_have_url(f"{gateway.url}/console")
    box.fill(f" {first} ")
    box.press("Enter")
    expect(page).to_have_url(f"{gateway.url}/console/requests/{first}")
    expect(page.locator("#title")).to_have_text(first)
    page.goto(f"{gateway.url}/console")
    box.fill("req-nobody")
    box.press("Enter")
    expect(page.locator("#pulse")).to_have_text("not found")


def test_the_keyboard_is_enough(
    page: Page, gateway: GatewayProcess, worker: ScriptedWorker, told: list[Token]
) -> None:
    overview(page, gateway)
    focused = page.locator(":focus")

    def tab_to(selector: str) -> None:
        for _ in range(30):
            page.keyboard.press("Tab")
            if focused.evaluate(f"element => element.matches({selector!r})"):
                assert focused.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
                return
        raise AssertionError(f"nothing leads to {selector}")

    tab_to(".skip")
    expect(focused).to_be_in_viewport()
    page.keyboard.press("Enter")
    tab_to("#prompt")
    page.keyboard.type("Why?")
    page.keyboard.press("Control+Enter")
    worker.emit(worker.claim(), told, Finish("stop"))
    expect(page.locator("#answer-status")).to_contain_text("finished")
    tab_to("#answer-link")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"/console/requests/req-\w+$"))
    expect(page.locator("#answer-text")).to_have_text("".join(token.text for token in told).strip())
    tab_to("nav a")
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{gateway.url}/console")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_by_day_and_by_night(
    browser: Browser, gateway: GatewayProcess, worker: ScriptedWorker, told: list[Token], scheme: str
) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "color_scheme": scheme}
    with watched_page(browser, **phone, is_mobile=True, has_touch=True) as page:
        overview(page, gateway)
        send(page, "Why?")
        worker.emit(worker.claim(), told, Finish("stop"))
        expect(page.locator("#answer-status")).to_contain_text("finished")
        for _ in ("overview", "request"):
            assert page.evaluate("document.documentElement.scrollWidth") == 360
            ground, text = page.evaluate(
                "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
            )
            assert (brightness(ground) > brightness(text)) == (scheme == "light")
            page.locator("#answer-link").click()
            expect(page.locator("#facts")).to_contain_text("First token")
            page.evaluate("document.body.id = 'answer-link'")


def brightness(color: str) -> int:
    return sum(map(int, re.findall(r"\d+", color)[:3]))
