"""Demo page: a browser plays a typed sentence.

The page uses the front end and a Triton server of the demo.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from testkit.models.golden import ROOT
from testkit.rigs.chromium import Page, chromium
from token2wav_server import Ports


def speak(page: Page, text: str) -> str:
    page.evaluate(f"text.value = {text!r}")
    page.evaluate("speak.click()")
    page.wait_for("/^(done|error)/.test(state.textContent)")
    return page.text("state")


def test_a_typed_sentence_is_heard(tmp_path: Path) -> None:
    port = Ports.free().http
    command = [sys.executable, "-m", "examples.browser.demo", f"--port={port}"]
    with (
        chromium(tmp_path / "profile") as page,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as demo,
    ):
        try:
            assert demo.stdout is not None
            assert demo.stdout.readline().startswith("$ token2wav serve examples/demo_voice/model ")
            assert demo.stdout.readline() == f"open http://127.0.0.1:{port}\n"
            page.open(f"http://127.0.0.1:{port}")
            page.wait_for("texts.children.length == 4")
            page.evaluate("rate.value = 100")
            assert speak(page, "Good morning, and welcome.") == "done"
            sent, tokens = map(int, page.text("sent").split(" / "))
            assert sent == tokens > 25
            assert page.text("received") == page.text("played") == str(960 * tokens)
            assert re.fullmatch(r"\d\.\d\d s", page.text("first"))
            assert page.text("buffer") == "0.00 s"
            assert page.text("underruns").isdigit()
            assert float(page.text("loudness")) > 0.01
            assert speak(page, "...") == "error: sentence: 0 words; at least 1 is needed"
            assert page.errors == []
        finally:
            demo.terminate()
