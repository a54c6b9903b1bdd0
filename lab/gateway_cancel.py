"""Time until language model and speech server stop after a client of the gateway has left.

A client asks for a long text, reads its first audio and closes the connection.

    .venv/bin/python -m lab.gateway_cancel
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import httpx
from tqdm import tqdm

from benchmarks.environment import describe, program_parser, save
from benchmarks.load.gateway import gateway
from benchmarks.load.listener import REQUEST
from benchmarks.load.subject import TRAINED, Subject
from testkit.rigs.metrics import scrape
from token2wav_server import Ports, TritonServer

_MODEL = TRAINED["demo_voice"]
_TEXT_S = 60.0  # longer than any client listens
_SPEED = 2.0  # tokens of the language model, as a multiple of speech
_POLL_S = 0.001
_PATIENCE_S = 10.0
_CANCELLED = 'token2wav_streams_ended_total{reason="cancelled"}'


def cancelled_streams(metrics_url: str) -> int:
    """Returns the number of streams that the speech server has cancelled."""
    return int(scrape(metrics_url).get(_CANCELLED, 0))


def seconds_until(count: Callable[[], int], before: int, began: float) -> float:
    """Returns the seconds from `began` until a count is higher than before.

    Raises:
        TimeoutError: nothing was counted in time.
    """
    while count() == before:
        if time.monotonic() > began + _PATIENCE_S:
            raise TimeoutError(f"nothing was cancelled within {_PATIENCE_S:g} s")
        time.sleep(_POLL_S)
    return time.monotonic() - began


def main() -> None:
    parser = program_parser()
    parser.add_argument("--texts", type=int, default=50, help="texts that are cancelled")
    options = parser.parse_args()
    subject, times = Subject.of(_MODEL, _TEXT_S), list[tuple[float, float]]()
    with (
        TritonServer(_MODEL, ports=Ports.free(), verbose=False) as server,
        gateway(server.grpc_url, subject, _SPEED) as (url, answer),
        httpx.Client(base_url=url, timeout=_PATIENCE_S) as http,
    ):
        texts = partial(getattr, answer.state, "cancelled")
        streams = partial(cancelled_streams, server.metrics_url)
        for _ in tqdm(range(options.texts), unit="text", leave=False):
            before = texts(), streams()
            with http.stream("POST", "/v1/audio/speech", json=REQUEST) as response:
                next(response.iter_raw())
                began = time.monotonic()
            times.append(
                (seconds_until(texts, before[0], began), seconds_until(streams, before[1], began))
            )
    result = {}
    for index, name in enumerate(("language_model_ms", "speech_server_ms")):
        values = sorted(round(1000 * pair[index], 1) for pair in times)
        print(f"{name}: median {median(values):.1f}, longest {values[-1]:.1f}")
        result[name] = values
    save("gateway_cancel", {**describe(), **result})


if __name__ == "__main__":
    main()
