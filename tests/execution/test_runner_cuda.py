"""Properties of the flow that only a GPU can show: captured graphs equal steps that run one by one,
and both equal the CPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from testkit.batches import spoken_together
from testkit.models.golden import TINY, snr_db
from testkit.utterances import a_voice, some_tokens
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.execution.cuda_graphs import SWITCH
from token2wav.execution.step import TorchStep
from token2wav_export.verify import stream_mel

MEL = 2e-4  # of float32: other kernels sum in another order
HALF = 1e-2  # of float16, relative to the spread of the mel
# Signal-to-noise ratio of audio against the CPU, in dB. The pitch of these random weights follows
# every rounding: on a CPU, a mel error of 1e-5 leaves 24 to 34 dB. An H200 leaves 31 and 33 dB. The
# audio of another utterance has less than 0 dB.
AUDIO_DB = 20

pytestmark = pytest.mark.gpu
CASES = [(0, 30), (41, 60), (75, 260)]
MANY_PAGES = 520  # more than 511, the width of the block tables of an earlier version


def load(precision: str, stream: StreamConfig | None = None) -> Token2Wav:
    runtime = RuntimeConfig(device="cuda", backend="torch", precision=precision, cache_mib=512)  # type: ignore[arg-type]
    return Token2Wav.load(TINY, stream=stream, runtime=runtime)


@pytest.fixture(scope="module")
def reference() -> Token2Wav:
    return Token2Wav.load(TINY, runtime=RuntimeConfig(device="cpu", backend="torch"))


@pytest.fixture(params=["float32", "float16"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    torch.cuda.empty_cache()


def test_replay_equals_eager(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = load(precision)
    monkeypatch.setenv(SWITCH, "0")
    eager = load(precision)
    assert isinstance(eager.pipeline.flow._runners[10].step, TorchStep)
    for prompt, length in CASES:
        tokens, voice = some_tokens(length), a_voice(prompt)
        mel, expected = stream_mel(captured, tokens, voice), stream_mel(eager, tokens, voice)
        bound = MEL if precision == "float32" else HALF * float(expected.std())
        assert np.sqrt(np.mean((mel - expected) ** 2)) <= bound


def test_a_second_model_has_graphs_of_its_own(reference: Token2Wav) -> None:
    """Its graphs work while the first model exists, and after the first model is gone."""
    tokens, voice = some_tokens(60), a_voice(41)
    expected = stream_mel(reference, tokens, voice)
    first, second = load("float32"), load("float32")
    for model in (first, second):
        assert np.sqrt(np.mean((stream_mel(model, tokens, voice) - expected) ** 2)) <= MEL
    del first, second, model
    assert np.sqrt(np.mean((stream_mel(load("float32"), tokens, voice) - expected) ** 2)) <= MEL


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees no second CUDA device")
def test_a_model_on_another_gpu(reference: Token2Wav) -> None:
    tokens, voice = some_tokens(60), a_voice(41)
    runtime = RuntimeConfig(device="cuda:1", backend="torch", precision="float32", cache_mib=512)
    audio = Token2Wav.load(TINY, runtime=runtime).synthesize(tokens, voice)
    assert snr_db(audio, reference.synthesize(tokens, voice)) >= AUDIO_DB


LOSE_THE_DEVICE = """
import sys, numpy, torch
from testkit.utterances import a_voice, some_tokens
from token2wav import RuntimeConfig, Token2Wav
from token2wav.errors import DeviceLostError
model = Token2Wav.load(sys.argv[1], runtime=RuntimeConfig(device="cuda", backend="torch", \
cache_mib=512))
assert len(model.synthesize(some_tokens(30), a_voice(0)))
torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]  # fails in the kernel, \
later than it is called
try:
    model.synthesize(some_tokens(30), a_voice(0))
except DeviceLostError as error:
    print("lost:", error)
"""


def test_a_failed_kernel_costs_the_process_its_device() -> None:
    """The failure runs in a separate process, because a process cannot use the GPU afterwards."""
    command = [sys.executable, "-c", LOSE_THE_DEVICE, str(TINY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "lost: backend: this process can no longer use the GPU" in done.stdout, done.stderr


def test_audio_of_a_stream_on_the_gpu(reference: Token2Wav) -> None:
    tokens, voice = some_tokens(150), a_voice(30)
    assert (
        snr_db(load("float32").synthesize(tokens, voice), reference.synthesize(tokens, voice))
        >= AUDIO_DB
    )


def test_two_threads_with_their_own_step_counts() -> None:
    """The graphs of both step counts share one pool, and one set of rows for states."""
    stream = StreamConfig(steps=(10, 5))
    exact = Token2Wav.load(
        TINY, stream=stream, runtime=RuntimeConfig(device="cpu", backend="torch")
    )
    model, turns = load("float32", stream), [10, 5, 10, 5]
    tokens, voice = some_tokens(110), a_voice(30)
    with ThreadPoolExecutor(2) as threads:
        mels = list(threads.map(lambda steps: stream_mel(model, tokens, voice, steps), turns))
    for steps, mel in zip(turns, mels, strict=True):
        assert np.abs(mel - stream_mel(exact, tokens, voice, steps)).max() <= MEL


def test_a_batch_above_the_largest_graph(reference: Token2Wav) -> None:
    """40 chunks of 4 blocks are more than the 128 blocks of the largest graph."""
    voice, kinds = a_voice(0), [some_tokens(178, seed) for seed in range(3)]
    expected = [reference.synthesize(tokens, voice) for tokens in kinds]
    utterances = [(voice, kinds[index % 3], 0) for index in range(40)]
    for index, audio in enumerate(spoken_together(load("float32").pipeline, utterances)):
        assert snr_db(audio, expected[index % 3]) >= AUDIO_DB


def test_a_long_history_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, voice = some_tokens(25 * MANY_PAGES), a_voice(0)
    mel = stream_mel(load("float16"), tokens, voice)
    monkeypatch.setenv(SWITCH, "0")
    expected = stream_mel(load("float16"), tokens, voice)
    assert np.sqrt(np.mean((mel - expected) ** 2)) <= HALF * float(expected.std())
