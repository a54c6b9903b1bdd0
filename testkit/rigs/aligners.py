"""Aligners of a made-up distribution, one for each kind of misbehaviour."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from testkit.rigs import plugins
from token2wav_gateway.words.aligners import Aligner, WholeAligner, Word, begin

# An aligner fails as its name says for texts with "bad", and aligns other texts letter by letter.
_CODE = """
import ctypes, os, subprocess, sys, time

class Letters:
    rate_hz = 8000

    def align(self, text, samples):
        if "bad" in text:
            return self.bad(text, samples)
        return self.good(text, samples)

    def good(self, text, samples):
        seconds, letters = len(samples) / self.rate_hz, [c for c in text if not c.isspace()]
        step = seconds / len(letters)
        return [(letter, i * step, (i + 1) * step) for i, letter in enumerate(letters)]

class Hangs(Letters):
    def bad(self, text, samples):
        time.sleep(3600)

class HangsDeaf(Letters):
    def bad(self, text, samples):
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ctypes.CDLL(None).sleep(3600)

class Forks(Letters):
    def bad(self, text, samples):
        if os.fork() == 0:  # keeps the pipe of the answers open
            time.sleep(3600)
        os._exit(0)

class Helped(Letters):
    def __init__(self):
        subprocess.Popen(["sleep", "3600"])

class HelpedByFork(Letters):
    def __init__(self):
        if os.fork() == 0:  # keeps the pipes open by which the end of a process is noticed
            time.sleep(3600)

class ForksAndAnswers(Letters):
    def bad(self, text, samples):
        if os.fork() == 0:
            time.sleep(0.5)
        return self.good(text, samples)

class AnswersTwice(Letters):
    def bad(self, text, samples):
        parent = os.getpid()
        if os.fork() == 0:
            os.getpid = lambda: parent
            time.sleep(0.5)
        return self.good(text, samples)

class Exits(Letters):
    def bad(self, text, samples):
        os._exit(0)

class Crashes(Letters):
    def bad(self, text, samples):
        ctypes.string_at(0)

class Raises(Letters):
    def bad(self, text, samples):
        raise ValueError(f"cannot say {text}")

class Greedy(Letters):
    def bad(self, text, samples):
        return [bytearray(1 << 31)]

class Prints(Letters):
    def good(self, text, samples):
        print("x" * 100_000, flush=True)
        os.write(1, b"\\x00\\x00\\x00\\xff")
        return super().good(text, samples)
    bad = good

class Floods(Letters):
    def bad(self, text, samples):
        return [(text, 0.0, 0.1)] * 1_000_000

class Rubbish(Letters):
    def bad(self, text, samples):
        return eval(text.partition("bad ")[2])

class Follows:
    rate_hz = 8000

    def begin(self, text):
        return Following(text)

class Following:
    def __init__(self, text):
        self.bad, self.letters = "bad" in text, [c for c in text if not c.isspace()]
        self.samples = self.told = 0

    def feed(self, samples):
        self.samples += len(samples)
        words, seconds = [], self.samples // 8000
        while self.told < min(seconds, len(self.letters)):
            start = 0 if self.bad else self.told
            words.append((self.letters[0 if self.bad else self.told], start, self.told + 1))
            self.told += 1
        return words

    def finish(self):
        end = self.samples / 8000
        return [(letter, min(self.told, end), end) for letter in self.letters[self.told:]]

class SlowToLoad(Letters):
    bad = Letters.good
    def __init__(self):
        time.sleep(3600)

class FailsToLoad(Letters):
    def __init__(self):
        raise OSError("no model")
"""
NAMES = re.findall(r"^class (\w+)", _CODE, re.MULTILINE)


def align(aligner: Aligner | WholeAligner, text: str, samples: NDArray[np.int16]) -> list[Word]:
    """Aligns a text with its whole audio."""
    alignment = begin(aligner, text)
    return [*alignment.feed(samples), *alignment.finish()]


@contextmanager
def installed(site: Path) -> Iterator[None]:
    """Installs them into a folder, with an entry point for each of `NAMES`."""
    names = [*NAMES, "missing"]
    with plugins.installed(site, "made_up_aligners", _CODE, "token2wav.aligners", names):
        yield
