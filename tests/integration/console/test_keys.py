"""The console page of a gateway with API keys: it asks for one, and shows what that one may see."""

import secrets

from playwright.sync_api import Page, expect

from tests.gateway_rig import GatewayProcess, ScriptedWorker

KEY = secrets.token_hex(16)
GATEWAY = {"API_KEY": KEY}


def give(page: Page, key: str) -> None:
    page.get_by_role("dialog").get_by_label("Key").fill(key)
    page.get_by_role("button", name="Use this key").click()


def test_the_page_asks_for_a_key(page: Page, gateway: GatewayProcess, worker: ScriptedWorker) -> None:
    seen: list[str | None] = []
    page.on("request", lambda request: seen.append(request.headers.get("authorization")))
    page.goto(f"{gateway.url}/console")
    expect(page.get_by_role("dialog")).to_contain_text("This gateway asks for a key")
    give(page, "a key that nobody was given")
    expect(page.get_by_role("dialog")).to_contain_text("does not know this key")
    page.keyboard.press("Escape")
    expect(page.locator("#notice")).to_contain_text("does not know this key")
    page.get_by_role("button", name="Give a key").click()
    give(page, KEY)
    expect(page.locator(".worker")).to_have_count(1)
    expect(page.locator("#notice")).to_be_hidden()
    assert seen[-1] == f"Bearer {KEY}"

    page.reload()
    expect(page.locator(".worker")).to_have_count(1)
    assert page.evaluate("document.cookie") == ""
    assert page.evaluate("Object.keys(localStorage)") == []

    page.get_by_role("button", name="API key set").click()
    page.get_by_role("button", name="Forget it").click()
    expect(page.get_by_role("dialog")).to_contain_text("This gateway asks for a key")
