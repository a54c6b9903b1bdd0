"""Process of an aligner: reads texts and their audio from standard input, and answers with JSON.

    python -m token2wav_gateway.words.aligner_worker NAME MEMORY_MIB

`word_times.py` starts it, and ends it if it takes too long. A request is a header, the text if it
is the first one of its text, and samples. An answer is the number of its request, its length, and a
JSON object: `ready`, `words` or `error`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

# Number, number of the text, its bytes, bytes of the samples, sample rate, and a constant below.
REQUEST = struct.Struct("<QQIIiB")
ANSWER = struct.Struct("<QI")  # number of the request, bytes of the JSON
LOADED = 0  # number of the first answer, which no request asks for
ONGOING, LAST, DROPPED = 0, 1, 2  # whether audio of the text follows; none for a text given up
_NICE = 10  # audio goes first
_PR_SET_PDEATHSIG = 1


def main() -> None:
    name, memory_mib = sys.argv[1], int(sys.argv[2])
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # an aligner that hangs ends with the gateway too
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the aligner prints is no answer
    # Imported after the memory was limited.
    import numpy as np
    import soxr

    from token2wav_gateway.words.aligners import ALIGNERS, Alignment, begin

    try:
        aligner = ALIGNERS.load(name)()
    except Exception as error:
        _answer(answers, LOADED, {"error": f"{type(error).__name__}: {error}"[:500]})
        return
    _answer(answers, LOADED, {"ready": True})
    process = os.getpid()
    open_texts: dict[int, tuple[Alignment, soxr.ResampleStream]] = {}
    while header := sys.stdin.buffer.read(REQUEST.size):
        number, key, text_bytes, sample_bytes, rate_hz, state = REQUEST.unpack(header)
        text = sys.stdin.buffer.read(text_bytes).decode()
        samples = np.frombuffer(sys.stdin.buffer.read(sample_bytes), "<i2")
        try:
            if text:
                resampler = soxr.ResampleStream(rate_hz, aligner.rate_hz, 1, dtype="int16")
                open_texts[key] = begin(aligner, text), resampler
            alignment, resampler = open_texts.pop(key)
            words: list[Any] = []
            if state != DROPPED:
                words += alignment.feed(resampler.resample_chunk(samples, state == LAST))
            if state == LAST:
                words += alignment.finish()
            if state == ONGOING:
                open_texts[key] = alignment, resampler
            content = json.dumps({"words": [list(word) for word in words]}, allow_nan=False)
        except Exception as error:  # its message may repeat the text, which is never logged
            content = json.dumps({"error": type(error).__name__})
        if os.getpid() != process:  # the aligner has forked, and its parent answers
            os._exit(0)
        _answer(answers, number, content)


def _answer(answers: BinaryIO, number: int, content: dict[str, Any] | str) -> None:
    encoded = (content if isinstance(content, str) else json.dumps(content)).encode()
    answers.write(ANSWER.pack(number, len(encoded)) + encoded)
    answers.flush()


if __name__ == "__main__":
    main()
