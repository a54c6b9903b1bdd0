"""The browser example: a real server, the bridge, and a headless Chromium that plays the audio."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from testkit.models.golden import DATA, ROOT
from testkit.rigs.chromium import Page, chromium
from testkit.rigs.server_rig import Rig
from token2wav_server.launcher.ports import Ports

TOKENS = 75  # 3 s
DRAWN = """(() => {
  const { width, height } = chart;
  const pixels = chart.getContext("2d").getImageData(0, 0, width, height).data;
  const count = (red, green, blue) => {
    let found = 0;
    for (let at = 0; at < pixels.length; at += 4)
      found += pixels[at] === red && pixels[at + 1] === green && pixels[at + 2] === blue;
    return found;
  };
  return [count(0xd9, 0x82, 0x2b), count(0x9c, 0xc3, 0xee), count(0x2b, 0x6c, 0xb0)];
})()"""


@pytest.fixture
def page_url(rig: Rig, tmp_path: Path) -> Iterator[str]:
    """URL of a bridge to the server."""
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.load(DATA / "demo" / "tokens.npy")[:TOKENS])
    port = Ports.free().http
    command = [sys.executable, "-m", "examples.browser.bridge", f"--tokens={tokens}"]
    command += [
        f"--voice={DATA / 'demo' / 'voice.safetensors'}",
        f"--url={rig.server.grpc_url}",
        f"--port={port}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as bridge:
        assert bridge.stdout is not None
        try:
            assert bridge.stdout.readline() == f"open http://127.0.0.1:{port}\n"
            yield f"http://127.0.0.1:{port}"
        finally:
            bridge.terminate()


def speak(page: Page) -> None:
    page.evaluate("speak.click()")
    page.wait_for("/^(done|error)/.test(state.textContent)")
    assert page.text("state") == "done"


def test_a_page_plays_a_stream_as_it_arrives(rig: Rig, page_url: str, tmp_path: Path) -> None:
    with chromium(tmp_path / "profile") as page:
        page.open(page_url)
        page.wait_for("text.value")
        page.evaluate("rate.value = 200")
        # that the slider allows: other programs keep this machine busy
        for seconds in (0.2, 0.4, 0.8, 2):
            page.evaluate(f"wait.value = {seconds}")
            speak(page)
            assert page.text("received") == page.text("played") == str(960 * TOKENS)
            assert float(page.text("loudness")) > 0
            if page.text("underruns") == "0":
                break
        assert page.text("underruns") == "0"
        assert min(page.evaluate(DRAWN)) > 100
        page.screenshot(tmp_path / "page.png")

        page.evaluate("text.value = '9999'")
        page.evaluate("speak.click()")
        page.wait_for("state.textContent.startsWith('error: ')")
        assert "outside the vocabulary" in page.text("state")

        page.evaluate("text.value = '1 '.repeat(500)")
        page.evaluate("rate.value = 25")
        page.evaluate("speak.click()")
        page.wait_for("Number(received.textContent) > 0")
        assert rig.open_streams() == {"scheduler": 1, "engine": 1}
        page.open("about:blank")
        rig.wait_until_empty()  # a page that is left cancels its utterance
    assert page.errors == []
