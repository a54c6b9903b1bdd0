"""A small /dev/shm, as docker gives: through it the Python backend passes every tensor."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

from testkit.models.golden import TINY, GoldenSet
from testkit.rigs.serve_command import Serving
from token2wav_client import Client, ClientError, ClientVoice


def with_shm(size: str) -> list[str]:
    """A command that runs another one with a /dev/shm of its own."""
    return [
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"',
        "sh",
    ]


@pytest.fixture(autouse=True)
def _may_mount() -> None:
    try:
        tried = subprocess.run(
            [*with_shm("1m"), "true"], capture_output=True, text=True, check=False
        )
        problem = tried.stderr.strip() if tried.returncode else ""
    except FileNotFoundError as error:
        problem = str(error)
    if problem:
        pytest.skip(f"a small /dev/shm needs the right to mount one: {problem}")


def test_too_small_to_start() -> None:
    with Serving.start(TINY, inside=with_shm("256k")) as serving:
        line = serving.wait_for_line("^token2wav serve: error: ")
        assert "bytes free in /dev/shm; enlarge it, in docker with --shm-size=1g" in line
        assert serving.wait() == 3


def test_too_small_for_a_request(golden: GoldenSet, voice: ClientVoice) -> None:
    """The request that does not fit gets an error; normal ones go on."""
    with Serving.start(TINY, "--canary-seconds=0", inside=with_shm("8m")) as serving:
        serving.wait_for_line("token2wav: warning: shared memory: 8 MB free in /dev/shm: ")
        serving.wait_for_line("token2wav: ready, ")
        with Client(serving.url) as client:
            with pytest.raises(ClientError):
                list(client.synthesize([np.zeros(4_000_000, np.int32)], voice))
            samples = sum(len(chunk.audio) for chunk in client.synthesize([golden.tokens], voice))
        assert samples == 960 * len(golden.tokens)
        serving.process.terminate()
        assert serving.wait() == 0
