"""Frames and texts of the native front, with sanitizers: noise of an engine, which it reads as the
Python front does, and texts of clients.
"""

from __future__ import annotations

import json
import math
import random
import struct
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from token2wav_server.engine.frames import (
    AUDIO,
    FAILED,
    FINISHED,
    LARGEST_FRAME,
    READY,
    FailedFrame,
    FrameBuffer,
    FrameError,
    audio_frame,
    failed_frame,
    finished_frame,
    parse_audio,
    parse_failed,
    parse_ready,
    parse_request,
    parse_slot,
    ready_frame,
)
from token2wav_server.front.build import SOURCES

CASES = 20_000  # two seconds
Check = Callable[[str, Iterable[bytes]], list[str]]

VALID = [
    ready_frame(),
    audio_frame(1, {}),
    audio_frame(2, {"audio": np.arange(5, dtype=np.float32), "final": np.array([True])}),
    audio_frame(3, {"é": np.zeros((2, 0, 3), np.int16), "scalar": np.array(1.0)}),
    finished_frame(1),
    failed_frame(FailedFrame(4, 3, "")),
    failed_frame(FailedFrame(5, 4, "tokens: é is too many")),
]


@pytest.fixture(scope="module")
def check(compiler: list[str], tmp_path_factory: pytest.TempPathFactory) -> Check:
    """Runs cases of one kind through the program, and returns its lines."""
    program = tmp_path_factory.mktemp("native") / "frames_check"
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = [*compiler, "-std=c++17", "-O1", "-g", *sanitizers, f"-I{SOURCES}"]
    sources = [
        Path(__file__).with_name("frames_check.cc"),
        SOURCES / "frames.cc",
        SOURCES / "text.cc",
    ]
    built = subprocess.run(
        [*command, *map(str, sources), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode and "san" in built.stderr.partition("cannot find")[2]:
        pytest.skip("the C++ compiler has no sanitizers")
    assert built.returncode == 0, built.stderr

    def run(letter: str, cases: Iterable[bytes]) -> list[str]:
        stream = b"".join(letter.encode() + struct.pack("<I", len(case)) + case for case in cases)
        done = subprocess.run([program], input=stream, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().removesuffix("\n").split("\n")

    return run


PARSERS: dict[int, Callable[[bytearray], object]] = {
    READY: parse_ready,
    AUDIO: parse_audio,
    FINISHED: parse_slot,
    FAILED: parse_failed,
}


def frames_of(stream: bytes) -> tuple[int, bool]:
    """Returns the number of frames that the Python front reads before it refuses one, and whether
    it does.
    """
    count = 0
    try:
        for content in FrameBuffer().add(stream):
            PARSERS[content[0]](content)
            count += 1
    except (FrameError, KeyError):
        return count, True
    return count, False


def mutated(rng: random.Random) -> bytes:
    """Returns frames with a few changes, or noise."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(200))
    stream = bytearray(b"".join(rng.choices(VALID, k=rng.randrange(1, 5))))
    for _ in range(rng.randrange(4)):
        start = rng.randrange(len(stream) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            stream[start:start] = rng.randbytes(rng.randrange(9))
        elif kind == 1:
            del stream[start : start + rng.randrange(9)]
        elif kind == 2 and start < len(stream):
            stream[start] = rng.choice([0, 1, 8, 127, 128, 255, rng.randrange(256)])
        else:
            stream[start : start + 8] = struct.pack("<q", rng.choice([0, -1, 2**62, 2**63 - 1]))
    return bytes(stream)


def test_frames_of_an_engine_that_is_mad(check: Check) -> None:
    rng = random.Random(0)
    cases = [*VALID, b"".join(VALID), *(mutated(rng) for _ in range(CASES))]
    wanted = [frames_of(case) for case in cases]
    assert [count for count, _ in wanted[: len(VALID) + 1]] == [1] * len(VALID) + [len(VALID)]
    assert 0.2 < np.mean([bad for _, bad in wanted]) < 0.9
    for case, line, (count, bad) in zip(cases, check("s", cases), wanted, strict=True):
        shown, _, problem = line.partition(" ")
        assert (int(shown), bool(problem)) == (count, bad), (case, line)


def test_large_frames_and_a_length_that_is_only_claimed(check: Check) -> None:
    large = audio_frame(1, {"audio": np.zeros(1_000_000, np.float32)})
    claimed = struct.pack("<IB", LARGEST_FRAME, AUDIO) + bytes(100)
    assert check("s", [large * 3 + finished_frame(1), claimed]) == ["4", "0"]


def texts() -> list[bytes]:
    rng = random.Random(1)
    pieces = [
        "a",
        '"',
        "\\",
        "\n",
        "\x7f",
        "\x1f",
        "é",
        "\u2028",
        "\ufffd",
        "\uffff",
        "𝄞",
        "\U0010ffff",
    ]
    valid = ["".join(rng.choices(pieces, k=rng.randrange(9))).encode() for _ in range(2000)]
    surrogate, overlong, beyond = (
        b"\xed\xa0\x80",
        b"\xc0\x80\xe0\x9f\xbf\xf0\x8f\xbf\xbf",
        b"\xf4\x90\x80\x80",
    )
    cut = [text[: rng.randrange(len(text) + 1)] for text in valid]
    noise = [rng.randbytes(rng.randrange(6)) for _ in range(5000)]
    lead = [
        bytes([first, second, 0x80, 0x80]) for first in range(0xC0, 0x100) for second in range(256)
    ]
    return [
        *valid,
        surrogate,
        overlong,
        beyond,
        *cut,
        *noise,
        *lead,
        *(bytes([n]) for n in range(256)),
    ]


def decoded(text: bytes) -> str | None:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


def test_utf8_is_what_python_decodes(check: Check) -> None:
    cases = texts()
    assert check("u", cases) == [str(int(decoded(case) is not None)) for case in cases]


def test_json_of_any_text(check: Check) -> None:
    cases = [case for case in texts() if b"\0" not in case]
    for case, line in zip(cases, check("j", cases), strict=True):
        members: Any = json.loads(line)
        text = decoded(case)
        if text is None:
            [first, second] = members.values()
            assert first == second
            assert "\ufffd" in first
        else:
            assert members == {text: text, "more": text}


def test_json_of_any_double(check: Check) -> None:
    rng = random.Random(2)
    values = [0.0, -0.0, 1.0, -1.5, 0.1, 1e16, 1e17, 1e300, 5e-324, math.inf, -math.inf, math.nan]
    values += [struct.unpack("<d", rng.randbytes(8))[0] for _ in range(2000)]
    for value, line in zip(values, check("d", [struct.pack("<d", v) for v in values]), strict=True):
        read = json.loads(line)["value"]
        assert isinstance(read, float)
        assert repr(read) == repr(value)


def test_an_input_in_several_buffers(check: Check) -> None:
    """Triton may keep an input in pieces."""
    cases = [bytes(range(size)) for size in (0, 1, 2, 3, 255)]
    for case, line in zip(cases, check("r", cases), strict=True):
        [content] = FrameBuffer().add(bytes.fromhex(line))
        request = parse_request(content)
        assert (content[0], request.slot, request.flags, request.sequence_id) == (1, 7, 3, "name")
        assert request.inputs["voice_id"].tobytes() == case
