"""Pages of the gateway: a headless Chromium plays a typed text, in front of a server."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from examples import demo
from examples.demo_voice.recordings import PROMPT
from testkit.patience import until
from testkit.rigs.chromium import Page, chromium
from testkit.rigs.gateway_rig import PROMPT_TEXT, VOICE, GatewayRig, key_settings
from testkit.rigs.language_model import LanguageModel

KEY = "a key"
SETTINGS = {
    "voices": {"model": demo.MODEL, "default": VOICE},
    "aligner": {"name": "Letters", "timeout_s": 60},
    "keys": [key_settings("shop", KEY)],
}


@pytest.fixture(scope="module")
def speaker(made_up_aligners: object) -> LanguageModel:
    """Language model of a gateway that can import the aligners."""
    return LanguageModel()


def speak(page: Page, text: str) -> str:
    page.evaluate(f"text.value = {text!r}")
    page.evaluate("speak.click()")
    page.wait_for("/^(done|error)/.test(state.textContent)")
    return page.text("state")


def choose(page: Page, recording: bytes) -> None:
    """Chooses a file as the recording, as a user does in the dialogue of the browser."""
    page.evaluate(
        "(() => { const files = new DataTransfer();"
        f"const content = atob({base64.b64encode(recording).decode()!r});"
        "const bytes = Uint8Array.from(content, (letter) => letter.charCodeAt(0));"
        "files.items.add(new File([bytes], 'voice.wav', { type: 'audio/wav' }));"
        "recording.files = files.files; })()"
    )


def test_the_page_plays_a_text_and_shows_its_words(
    gateway: GatewayRig, speaker: LanguageModel, tmp_path: Path
) -> None:
    with chromium(tmp_path / "profile") as page:
        page.open(gateway.url)
        page.wait_for("!document.getElementById('keys').hidden")
        page.evaluate(f"key.value = {KEY!r}; key.onchange()")
        page.wait_for("voice.options.length == 2")
        page.evaluate(f"voice.value = {VOICE!r}")
        assert speak(page, "ab cd") == "done"
        assert page.text("received") == page.text("played") == str(2 * 6 * 960)
        assert page.text("words").split() == ["a", "b", "c", "d"]
        assert page.evaluate("document.querySelectorAll('#words .heard').length") == 4
        assert re.fullmatch(r"\d+\.\d\d s", page.text("first"))
        assert page.text("buffer") == "0.00 s"
        assert float(page.text("loudness")) > 0
        page.screenshot(tmp_path / "page.png")

        choose(page, b"no audio")
        assert speak(page, "ab cd").startswith("error: ref_audio: the recording: cannot be")
        choose(page, PROMPT.read_bytes())
        page.evaluate(f"ref_text.value = {PROMPT_TEXT!r}")
        assert speak(page, "ab cd") == "done"
        assert page.text("received") == page.text("played") == str(2 * 6 * 960)
        page.evaluate("recording.value = ''")

        before = speaker.cancelled
        page.evaluate(f"text.value = {'slow ' * 300!r}")
        page.evaluate("speak.click()")
        page.wait_for("Number(received.textContent) > 0")
        page.open("about:blank")  # a page that is left cancels its text
        until(lambda: speaker.cancelled == before + 1)
        assert page.errors == []


def test_the_page_of_all_requests_needs_no_other_host(gateway: GatewayRig, tmp_path: Path) -> None:
    with chromium(tmp_path / "profile") as page:
        page.open(f"{gateway.url}/docs")
        page.wait_for("document.querySelectorAll('h2').length > 5")
        requests = page.text("requests")
        assert "POST /v1/audio/speech" in requests
        assert "word_timestamps" in requests
        hosts = (
            "performance.getEntriesByType('resource').map((entry) => new URL(entry.name).origin)"
        )
        assert set(page.evaluate(hosts)) == {gateway.url}
        assert page.errors == []
