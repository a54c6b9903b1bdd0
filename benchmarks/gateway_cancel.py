"""Time from the moment when a client of the gateway leaves until both servers have stopped.

A client asks for a long text, reads its first audio and closes the connection. The program then
measures how long the language model goes on, and how long the speech server does. It prints the
median and the longest time, and saves all times.

    .venv/bin/python -m benchmarks.gateway_cancel
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import httpx
from tqdm import tqdm

from benchmarks.environment import describe, save
from benchmarks.open_loop import GATEWAY_REQUEST, TRAINED, Subject, gateway
from token2wav_server import Ports, TritonServer

_UTTERANCE_S = 60.0  # longer than any client listens
_PACE = 2.0  # tokens of the language model, as a multiple of speech
_POLL_S = 0.001
_PATIENCE_S = 10.0
_CANCELLED = re.compile(r'token2wav_streams_ended_total\{reason="cancelled"\} (\S+)')


def cancelled_streams(metrics_url: str) -> int:
    """Returns the number of streams that the speech server has cancelled."""
    match = _CANCELLED.search(httpx.get(f"http://{metrics_url}/metrics").text)
    return int(float(match[1])) if match else 0


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=50, help="texts that are cancelled")
    options = parser.parse_args()
    folder = TRAINED["demo_voice"]
    subject = Subject.of(folder, _UTTERANCE_S, _PACE)
    times: list[tuple[float, float]] = []
    with (
        TritonServer(folder, ports=Ports.free(), verbose=False) as server,
        gateway(server.grpc_url, subject) as (url, language_model),
        httpx.Client(base_url=url, timeout=_PATIENCE_S) as http,
    ):
        texts = partial(getattr, language_model.state, "cancelled")
        streams = partial(cancelled_streams, server.metrics_url)
        for _ in tqdm(range(options.texts), unit="text", leave=False):
            before = texts(), streams()
            with http.stream("POST", "/v1/audio/speech", json=GATEWAY_REQUEST) as response:
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
