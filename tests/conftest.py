from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from token2wav_server import PortInUseError, Ports
from token2wav_server.launcher.binaries import wheel_has_stub

# Set before torch is imported, and inherited by servers that tests start. Threads of several
# processes on few cores wait for one another far longer than the small models compute. Sums are
# equal only with equal numbers of threads.
os.environ["OMP_NUM_THREADS"] = "1"
# A GPU is hidden from tests that do not ask for it with `-m gpu`: the setting `device: auto` would
# find it, and the bounds of these tests are for float32 on a CPU. Workers inherit the variable.
if "PYTEST_XDIST_WORKER" not in os.environ and ("-m", "gpu") not in pairwise(sys.argv):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Tests that a shell runs in the background ignore SIGINT. Commands under test would inherit this,
# and tests of Ctrl-C would wait forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
import torch

# Set before the first test imports triton: without a GPU, triton interprets its kernels.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
from testkit.batches import WHOLE_BLOCKS
from testkit.flows import two_stages
from testkit.models.tiny_model import (
    ODE_STEPS,
    TINY,
    FaultyVocoder,
    demo_tokens,
    demo_voice,
)
from testkit.replies import Expected
from tests.stages.rig import Parts
from token2wav import RuntimeConfig, Token2Wav, Voice
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.serving.pipeline import Pipeline

# No test asserts speed, which depends on other processes of a busy machine. Every run tries the
# same examples.
settings.register_profile(
    "patient", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

ROOT = Path(__file__).parents[1]
# Folders of slow tests come first and folders of quick tests last, so that all workers end at about
# the same time. Folders that are not named are in between.
_FIRST = [
    "exporters",
    "examples",
    "served",
    "benchmarks",
    "kernels",
    "stages",
    "families",
    "serving",
]
_LAST = ["networks", "layers", "voices", "cache", "config", "scripts", "client"]
_USES_A_SHARED_SERVER = re.compile(r"def \w+\([^)]*\b((rig|limited): Rig|gateway: GatewayRig)\b")
_USES_SHARED_EXPORTS = re.compile(r"\bexport: Export\b")
_FIRST_PORT, _PORTS_OF_A_WORKER = 10_000, 2_000  # below the ephemeral ports of the kernel


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Scheduler that gives whole files to workers.

    Tests that share servers or slow exports stay together on one worker.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _scope(nodeid.partition("::")[0])


@cache
def _scope(file: str) -> str:
    text = (ROOT / file).read_text()
    if _USES_SHARED_EXPORTS.search(text):
        return "exports"
    shares = file.startswith("tests/served/") and _USES_A_SHARED_SERVER.search(text)
    return "servers" if shares else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    # files with few tests may take longer than files with many
    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(ROOT).parts[1]
        if folder in _FIRST:
            return _FIRST.index(folder)
        return len(_FIRST) + (1 + _LAST.index(folder) if folder in _LAST else 0)

    items.sort(key=rank)


@pytest.hookimpl(tryfirst=True)  # runs before fixtures, because they draw random numbers too
def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(0)  # makes rare failures repeatable
    if item.get_closest_marker("python_models") and not wheel_has_stub():
        pytest.skip("the wheel with tritonserver has no Python backend for this Python")
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")


@pytest.fixture(scope="session", autouse=True)
def _no_listener_runs_dry() -> Iterator[None]:
    """Stops the clock of the library's listeners.

    With a running clock, a slow machine would shorten hops, which changes the order of sums. The
    clock of workers keeps running.
    """
    init = Pipeline.__init__

    def init_without_time(self: Pipeline, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.clock = lambda: 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "__init__", init_without_time)
        yield


@pytest.fixture(scope="session", autouse=True)
def _ports_of_its_own() -> Iterator[None]:
    """Gives each pytest worker its own range of ports.

    Servers begin to listen seconds after the choice of their ports, so two workers could choose the
    same ones.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    start = _FIRST_PORT + worker % 10 * _PORTS_OF_A_WORKER
    begin = random.randrange(_PORTS_OF_A_WORKER)  # differs from other sessions on this machine
    numbers = (start + (begin + count) % _PORTS_OF_A_WORKER for count in itertools.count())

    def free(host: str = "127.0.0.1") -> Ports:
        while True:
            ports = Ports(next(numbers), next(numbers), next(numbers))
            with contextlib.suppress(PortInUseError):
                ports.check_free(host)
                return ports

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ports, "free", free)
        yield


@pytest.fixture(scope="session")
def config() -> CosyVoice3Config:
    return CosyVoice3Config.read(TINY)


@pytest.fixture(scope="session")
def loaded_model() -> Token2Wav:
    torch.set_num_threads(1)
    stream = replace(WHOLE_BLOCKS, steps=(ODE_STEPS,))
    return Token2Wav.load(TINY, stream=stream, runtime=RuntimeConfig(device="cpu"))


@pytest.fixture
def model(loaded_model: Token2Wav) -> Iterator[Token2Wav]:
    """The tiny model. After each test, no stream may be open in its engines."""
    yield loaded_model
    assert loaded_model.pipeline.open_streams == 0


@pytest.fixture(scope="session")
def voice() -> Voice:
    """A prompt of exactly one block: the first chunk takes 25 new tokens, and 3 to look ahead."""
    return demo_voice(25)


@pytest.fixture(scope="session")
def expected(loaded_model: Token2Wav, voice: Voice) -> Expected:
    """Returns the audio of the first n demo tokens in the fixture `voice`."""
    return cache(lambda count: loaded_model.synthesize(demo_tokens(count), voice))


@pytest.fixture(scope="session")
def _faulty() -> tuple[Token2Wav, FaultyVocoder]:
    parts = Parts.load()
    vocoder = FaultyVocoder(parts.hift, parts.source_noise)
    stages = two_stages(parts.incremental(65), vocoder)
    return Token2Wav(parts.config, stages, WHOLE_BLOCKS), vocoder


@pytest.fixture
def faulty(_faulty: tuple[Token2Wav, FaultyVocoder]) -> Iterator[tuple[Token2Wav, FaultyVocoder]]:
    """The tiny model on a vocoder that tests can make fail; checks that no stream stays open."""
    yield _faulty
    _faulty[1].fault = _faulty[1].open_fault = None
    assert _faulty[0].pipeline.open_streams == 0
