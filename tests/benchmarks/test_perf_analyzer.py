"""perf_analyzer: its inputs, the figures from its export, and one real run if it is installed.

tests/data/perf_analyzer has exports of version 2.60 for the tiny model: `two_at_once`, four
utterances of 2.4 s without the values of tensors, and `with_tensors`, an unchanged export of one
utterance of two tokens without a prompt.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks.perf_analyzer import (
    PERF_ANALYZER,
    PerfError,
    PerfLoad,
    own_figures,
    run_perf_analyzer,
)
from benchmarks.perf_export import ExportError, HeardUtterance, read_export, stripped, summary
from tests.support.golden import TINY
from token2wav.commands import main
from token2wav_client import ClientVoice
from token2wav_server import Ports, TritonServer

DATA = TINY.parent / "perf_analyzer"
TOKENS, VOICE = TINY.parent / "demo" / "tokens.npy", TINY.parent / "demo" / "voice.safetensors"


def make(folder: Path, *arguments: str) -> tuple[int, Path]:
    out = folder / "data.json"
    return main(
        ["perf-data", "--tokens", str(TOKENS), "--voice", str(VOICE), "--out", str(out), *arguments]
    ), out


def test_perf_data_holds_the_utterance_and_its_voice(tmp_path: Path) -> None:
    status, out = make(tmp_path)
    assert status == 0
    [step] = json.loads(out.read_text())["data"]
    voice = ClientVoice.load(VOICE)
    expected = {
        "tokens": np.load(TOKENS),
        "prompt_tokens": voice.prompt_tokens,
        "prompt_mel": voice.prompt_mel,
        "speaker_embedding": voice.speaker_embedding,
    }
    assert step.keys() == expected.keys()
    for name, array in expected.items():
        assert step[name]["shape"] == list(array.shape)
        np.testing.assert_array_equal(
            np.array(step[name]["content"], array.dtype).reshape(array.shape), array
        )


@pytest.mark.parametrize(("seconds", "count"), [("2.4", 60), ("20", 500), ("0.001", 1)])
def test_perf_data_cuts_or_repeats_the_tokens(tmp_path: Path, seconds: str, count: int) -> None:
    status, out = make(tmp_path, "--seconds", seconds)
    assert status == 0
    [step] = json.loads(out.read_text())["data"]
    assert step["tokens"] == {
        "content": np.resize(np.load(TOKENS), count).tolist(),
        "shape": [count],
    }


def test_perf_data_names_unusable_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.txt").write_text(" ")
    status, _ = make(tmp_path, "--tokens", str(tmp_path / "none.txt"))
    assert (status, capsys.readouterr().err) == (
        2,
        f"token2wav perf-data: error: {tmp_path / 'none.txt'}: tokens: 0 found; an "
        "utterance needs at least 1\n",
    )
    status, _ = make(tmp_path, "--out", str(tmp_path / "missing" / "data.json"))
    assert status == 2
    assert "cannot be written" in capsys.readouterr().err


def test_export_gives_the_figures_of_listeners() -> None:
    heard = read_export(DATA / "two_at_once.json")
    assert [sum(utterance.samples) for utterance in heard] == [960 * 60] * 4
    figures = summary(heard, buffer_s=0.3)
    assert figures["utterances"] == 4
    assert figures["audio_seconds"] == 9.6
    # Computed by hand from the timestamps in the file, in nanoseconds.
    assert figures["first_audio_ms"]["max"] == round(
        (1795256868014891419 - 1795256866759527225) / 1e6, 1
    )
    assert figures["gap_ms"]["max"] == round((1795256868823319235 - 1795256868003630886) / 1e6, 1)
    took = (1795256869782398413 - 1795256866759527225) / 1e9
    assert figures["audio_seconds_per_second"] == round(9.6 / took, 2)
    assert figures["underruns"] == 0


def test_its_own_latency_is_that_of_the_last_audio() -> None:
    """perf_analyzer's latency is that of the last audio, although it prints otherwise.

    It prints that it uses the first response: docs/benchmarking.md.
    """
    whole = sorted(
        1000 * utterance.arrivals_s[-1] for utterance in read_export(DATA / "two_at_once.json")
    )
    assert own_figures(DATA / "two_at_once.csv")["latency_ms"]["p99"] == pytest.approx(
        whole[-1], abs=0.1
    )


def test_tensors_are_stripped_and_nothing_else(tmp_path: Path) -> None:
    raw = json.loads((DATA / "with_tensors.json").read_text())
    [request] = raw["experiments"][0]["requests"]
    small = tmp_path / "small.json"
    small.write_bytes(stripped(DATA / "with_tensors.json"))
    [stripped_request] = json.loads(small.read_text())["experiments"][0]["requests"]
    assert stripped_request["response_timestamps"] == request["response_timestamps"]
    assert stripped_request["response_outputs"][0] == request["response_outputs"][0] | {
        "audio": 1920
    }
    assert stripped_request["request_inputs"]["speaker_embedding"] == 192
    assert stripped(small) == small.read_bytes()
    assert read_export(small) == read_export(DATA / "with_tensors.json")
    assert summary(read_export(small), 0.3)["gap_ms"] is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"experiments":[]}',
        '{"experiments":[{"requests":[]}]}',
        (DATA / "with_tensors.json").read_text()[:40000],
        (DATA / "two_at_once.json")
        .read_text()
        .replace('"audio":39360', '"audio":""')
        .replace('"audio":18240', '"audio":""'),
    ],
    ids=["empty", "no load", "no requests", "cut off", "no audio"],
)
def test_an_export_that_is_not_whole_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "export.json"
    path.write_text(text)
    with pytest.raises(ExportError, match=r"export\.json"):
        read_export(path)


def test_a_player_runs_out_of_audio_only_after_its_buffer() -> None:
    second = 24000
    late = HeardUtterance(5.0, (1.0, 2.25, 3.5), (second, second, second))
    assert late.silences_s(0.0) == [0.25, 0.25]
    assert late.silences_s(0.3) == pytest.approx([0.2])
    assert late.silences_s(0.5) == []
    assert late.gaps_s == [1.25, 1.25]
    figures = summary([late, late], 0.3)
    assert (figures["underruns"], figures["silent_seconds"], figures["share_without_underrun"]) == (
        2,
        0.4,
        0.0,
    )


@pytest.fixture(scope="module")
def program() -> Path:
    environment = {**os.environ, "PERF_ANALYZER_DOWNLOAD": "0"}
    probe = subprocess.run(
        [PERF_ANALYZER, "--version"], env=environment, capture_output=True, text=True, check=False
    )
    if probe.returncode:
        pytest.skip(
            "perf_analyzer is not on this machine; scripts/perf_analyzer.sh --version downloads it"
        )
    return PERF_ANALYZER


def test_a_real_run_against_a_real_server(program: Path, tmp_path: Path) -> None:
    _, data = make(tmp_path, "--seconds", "2")
    with TritonServer(TINY, ports=Ports.free(), log_file=tmp_path / "triton.log") as server:
        for load in (PerfLoad(concurrency=2), PerfLoad(rate=2.0, distribution="poisson")):
            export, figures = run_perf_analyzer(server.grpc_url, data, load, 4, patience_s=120)
            path = tmp_path / "export.json"
            path.write_bytes(export)
            heard = read_export(path)
            assert [sum(utterance.samples) for utterance in heard] == [960 * 50] * 4
            assert summary(heard, 0.3)["utterances"] == 4
            slowest = max(1000 * utterance.arrivals_s[-1] for utterance in heard)
            assert figures["latency_ms"]["p99"] == pytest.approx(slowest, abs=0.1)
        np.save(tmp_path / "unknown.npy", np.array([5, 9999], np.int32))
        make(tmp_path, "--tokens", str(tmp_path / "unknown.npy"))
        with pytest.raises(
            PerfError, match=r"1 at once: .*tokens: 9999 at index 1 is outside the vocabulary"
        ):
            run_perf_analyzer(server.grpc_url, data, PerfLoad(concurrency=1), 1, patience_s=120)


def test_duration_of_a_load_is_computed_in_advance() -> None:
    assert PerfLoad(concurrency=4).seconds(30, 0.5) == 2 * 30 * 0.5, (
        "our client puts on the same load"
    )
    assert PerfLoad(rate=2.0, distribution="poisson").seconds(30, 0.5) == 2 * 15
    assert PerfLoad(rate=2.0, distribution="constant").seconds(30, 0.5) == 15, (
        "which our client does not have"
    )
