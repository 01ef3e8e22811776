"""A real browser, headless, and pages that notice what goes wrong in them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

WAIT_MS = 15_000
expect.set_options(timeout=WAIT_MS)
_FLAGS = (
    "--no-sandbox",  # which root cannot have
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium_binary() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def chromium(binary: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=list(_FLAGS))
        yield browser
        browser.close()


@contextmanager
def watched_page(browser: Browser, **context: Any) -> Iterator[Page]:
    """A page in a profile of its own. At its end no script had an error or did what the policy forbids, and
    no other server was asked anything."""
    inside = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **context})
    inside.set_default_timeout(WAIT_MS)
    page, wrong, asked = inside.new_page(), list[str](), set[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    # That an answer was a 401 or 503 is for the page to show, and a lost connection too.
    page.on("console", lambda message: wrong.extend(_errors(message)))
    page.on("request", lambda request: asked.add("/".join(request.url.split("/")[:3])))
    yield page
    inside.close()
    assert not wrong
    assert len(asked) <= 1


def _errors(message: ConsoleMessage) -> list[str]:
    return [message.text] if message.type == "error" and "Failed to load" not in message.text else []
