"""The page in a real browser: chat, stop, race, a reload in mid-stream, a server that goes away."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--no-sandbox",  # the tests may run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LONG = "Write a long story about a lighthouse keeper, with many chapters."
MINUTE = 60_000

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")


class Server:
    def __init__(self, model: Path, port: int = 0) -> None:
        command = [
            sys.executable,
            "-m",
            "paceline",
            "serve",
            str(model),
            "--port",
            str(port),
            "--threads",
            "2",
        ]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found.group(1))
            if line.rstrip().endswith("ready"):
                return
        pytest.fail("the server did not start")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=30)


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[Server]:
    server = Server(smollm2_path)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    page = browser.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(server.url)
    expect(page.locator("#model")).to_contain_text("up to")
    yield page
    page.close()
    assert faults == []


def ask(page: Any, message: str, most: int) -> Any:
    page.fill("#max-tokens", str(most))
    page.fill("#message", message)
    page.press("#message", "Enter")
    return page.locator(".answer").last


def finished(page: Any) -> None:
    expect(page.locator("#stop")).to_be_hidden(timeout=MINUTE)


def shown_tokens(answer: Any) -> int:
    return int(answer.locator(".facts span").first.locator("b").text_content())


def test_every_token_has_a_source(page: Any) -> None:
    answer = ask(page, "Write the word echo ten times, one per line.", 40)
    finished(page)
    pieces = answer.locator(".text span")
    assert pieces.count() == shown_tokens(answer)
    sources = {pieces.nth(i).get_attribute("data-source") for i in range(pieces.count())}
    assert "" in sources
    assert sources <= {"", "suffix", "ngram", "prediction"}
    assert answer.locator(".text").text_content().strip()


def test_one_source_alone_can_be_shown_by_keyboard(page: Any) -> None:
    answer = ask(page, "Repeat this line five times: the cat sat on the mat by the door", 60)
    finished(page)
    button = answer.locator(".legend button", has_text="suffix")
    button.focus()
    page.keyboard.press("Enter")
    pressed = answer.locator(".legend button[aria-pressed=true]")
    expect(pressed).to_contain_text("suffix")
    assert answer.locator(".text .shown").count() == answer.locator(".text [data-source=suffix]").count() > 0


def test_stop_keeps_what_was_written(page: Any) -> None:
    answer = ask(page, LONG, 2000)
    expect(answer.locator(".text span").nth(3)).to_be_attached(timeout=MINUTE)
    page.keyboard.press("Escape")
    finished(page)
    expect(answer.locator(".note")).to_have_text("Stopped.")
    assert 3 < shown_tokens(answer) < 2000


def test_a_reload_in_mid_stream_keeps_the_question_and_says_what_happened(page: Any) -> None:
    answer = ask(page, LONG, 2000)
    expect(answer.locator(".text span").nth(3)).to_be_attached(timeout=MINUTE)
    page.reload()
    expect(page.locator(".user")).to_have_text(LONG)
    expect(page.locator(".answer .note")).to_have_text("Interrupted by a reload.")
    again = ask(page, "Say hello.", 8)
    finished(page)
    assert shown_tokens(again) <= 8


def test_a_model_cannot_write_markup(page: Any) -> None:
    message = "Repeat exactly: <img src=x onerror=document.title='owned'><b>bold</b>"
    answer = ask(page, message, 40)
    finished(page)
    assert page.locator(".user").text_content() == message
    assert answer.locator("img, b:not(.facts b)").count() == 0
    assert page.title() == "Paceline"


def test_the_race_ends_identical(page: Any) -> None:
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#race")).to_be_visible()
    page.fill("#race-tokens", "60")
    page.fill("#race-temperature", "0.8")
    page.click("#go")
    expect(page.locator("#verdict")).to_contain_text("identical: yes", timeout=2 * MINUTE)
    plain, auto = page.locator("#lane-plain .text"), page.locator("#lane-auto .text")
    text = plain.text_content()
    assert text == auto.text_content() != ""
    page.click("#replay")
    for lane in (plain, auto):
        expect(lane).to_have_text(text, timeout=MINUTE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 360, "height": 740})
    for tab in ("#tab-chat", "#tab-race"):
        page.click(tab)
        widths = page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
        assert widths[0] <= widths[1]


def test_a_server_that_goes_away_and_comes_back(browser: Any, smollm2_path: Path) -> None:
    first = Server(smollm2_path)
    page = browser.new_page()
    try:
        page.goto(first.url)
        expect(page.locator("#model")).to_contain_text("up to")
        answer = ask(page, LONG, 2000)
        expect(answer.locator(".text span").nth(3)).to_be_attached(timeout=MINUTE)
        first.process.kill()
        finished(page)
        expect(answer.locator(".note")).to_contain_text("what came before is kept")
        expect(page.locator("#banner")).to_contain_text("does not answer")
        second = Server(smollm2_path, first.port)
        try:
            expect(page.locator("#banner")).to_be_hidden(timeout=MINUTE)
            again = ask(page, "Say hello.", 8)
            finished(page)
            assert shown_tokens(again) <= 8
        finally:
            second.stop()
    finally:
        page.close()
        first.process.kill()
        first.process.communicate(timeout=30)


def test_nothing_is_taken_from_elsewhere() -> None:
    folder = Path(__file__).parents[2] / "src" / "paceline" / "server" / "web"
    for file in folder.iterdir():
        found = re.findall(r"""(?:https?:)?//[\w.-]+\.\w+""", file.read_text(encoding="utf-8"))
        assert found == [], file.name
