"""What `make gpu-check` concludes from its records, and how it counts streams."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import FunctionEvent

from benchmarks.gpu.capacity import largest
from benchmarks.gpu.kernels import OTHER, device_spans, gaps_ms, kind_of, summary
from benchmarks.gpu.report import markdown
from benchmarks.gpu.serving import loads, past_knee
from benchmarks.gpu.settings import LEAN, rehearsal
from benchmarks.gpu.verdicts import Sections, faults, verdicts
from benchmarks.serving_load import server_settings
from tests.support.golden import ROOT

FACTS: dict[str, Any] = {
    "gpu": "NVIDIA H200",
    "driver": "1",
    "cuda": "13",
    "memory_mib": 1,
    "packages": {"torch": "2"},
    "size": "full",
    "cpus": 2,
    "processor": "x",
    "date": "2030-01-01",
    "commit": "abc",
    "command": "gpu_check",
    "problem": None,
}


def good() -> dict[str, dict[str, Any]]:
    """Records of a GPU that meets everything."""
    chunk = {
        "spoken_s": 0.0,
        "streams": 1,
        "hop_tokens": 25,
        "flow_ms": [6.0, 5.0, 7.0],
        "vocoder_ms": [3.0, 2.0, 4.0],
        "total_ms": [9.0, 7.0, 11.0],
        "floor_ms": 2.0,
        "ratio": 4.5,
    }
    drift = {"drift": -0.05, "third_ms": 9.0, "last_ms": 8.55, "chunks": 60, "left_blocks": 8}
    peer = {
        "spoken_s": 10.0,
        "hop_tokens": 100,
        "streams": 64,
        "recompute_ms": [50.0, 49.0, 51.0],
        "recompute_per_s": 20.0,
        "batch_ms": [256.0, 250.0, 260.0],
        "batch_per_s": 250.0,
        "ratio": 12.5,
        "problem": None,
    }
    heard = {
        "clients": 320,
        "rate": 25.0,
        "load": "320 clients, 25 tokens/s",
        "utterances": 320,
        "first_audio_ms": {"p50": 20.0, "p99": 90.0},
        "share_without_gaps": {"0.05 s": 0.995},
        "audio_seconds_per_second": 250.0,
        "mean_batch": 40.0,
        "failed": [],
    }
    engine: dict[str, Any] = {
        "case": {"engine": "torch", "precision": "float16", "graphs": True},
        "verification": {"failures": []},
        "problem": None,
    }
    absent = {**engine, "case": {**engine["case"], "engine": "tensorrt"}, "verification": None, "problem": "not there"}
    own: dict[str, dict[str, Any]] = {
        "tests": {"tests": 9, "skipped": 0, "failed": []},
        "parity": {"engines": [engine, absent], "buckets": []},
        "chunks": {"rows": [chunk], "drift": drift},
        "peer": {"rows": [peer]},
        "streams": {"capacity": [{"setup": "lean", "streams": 320, "at_least": False, "problem": None}]},
        "server": {"rows": [heard]},
    }
    return {name: {**FACTS, **content} for name, content in own.items()}


def words(sections: Sections) -> list[str]:
    return [verdict.word for verdict in verdicts(sections)]


def test_everything_met() -> None:
    sections = good()
    assert words(sections) == ["met"] * 5
    assert faults(sections) == []
    page = markdown(sections)
    assert page.startswith("# NVIDIA H200\n\nDriver 1, CUDA 13")
    assert "| 9.00 ms (7.00 to 11.00) | met |" in page
    assert "tensorrt float16 | - | - | - | not there |" in page


def test_each_aim_has_its_bound() -> None:
    sections = good()
    sections["chunks"]["rows"][0]["total_ms"] = [10.1, 9.0, 11.0]
    sections["chunks"]["drift"]["drift"] = 0.1
    sections["peer"]["rows"].append({**sections["peer"]["rows"][0], "ratio": 9.9})
    sections["streams"]["capacity"][0]["streams"] = 299
    sections["server"]["rows"][0]["share_without_gaps"]["0.05 s"] = 0.98
    assert words(sections) == ["not met"] * 5
    assert faults(sections) == []  # to be slow is no fault


def test_what_was_not_measured_says_why() -> None:
    sections = good()
    sections["chunks"] = {**FACTS, "problem": "its process was ended by SIGKILL"}
    del sections["server"]
    found = verdicts(sections)
    assert [verdict.met for verdict in found] == [None, None, True, True, None]
    assert found[0].measured == "its process was ended by SIGKILL"
    assert found[4].measured == "section server has not run"
    assert faults(sections) == ["section chunks: its process was ended by SIGKILL"]
    assert "**Ended early:** its process was ended by SIGKILL" in markdown(sections)


@pytest.mark.parametrize(
    ("facts", "title"), [({"gpu": None}, "# Rehearsal: no GPU"), ({"size": "tiny"}, "# Rehearsal: NVIDIA H200")]
)
def test_a_rehearsal_meets_nothing(facts: dict[str, Any], title: str) -> None:
    sections = {name: {**section, **facts} for name, section in good().items()}
    assert words(sections) == ["no verdict"] * 5
    assert markdown(sections).startswith(title)


def test_faults_are_named() -> None:
    sections = good()
    sections["tests"]["failed"] = ["tests.test_cuda.test_replay"]
    sections["parity"]["engines"][0]["verification"] = {"failures": ["mel_db is -20, the bound is -45"]}
    bucket = {"shape": [4, 2, 8], "precision": "float16", "filling": "part", "problem": "beyond", "bound": 1e-3}
    sections["parity"]["buckets"] = [bucket]
    assert faults(sections) == [
        "test failed: tests.test_cuda.test_replay",
        "engine torch float16: mel_db is -20, the bound is -45",
        "bucket 4x2x8 float16, part: beyond",
    ]


@pytest.mark.parametrize("limit", [0, 1, 7, 8, 9, 100, 321, 1023, 1024, 5000])
def test_the_search_ends_close_to_the_largest(limit: int) -> None:
    tried: list[int] = []

    def held(number: int) -> bool:
        tried.append(number)
        return number <= limit

    found = largest(held, 8, 1024)
    assert found <= min(limit, 1024) <= found + max(1, 0.06 * found)
    assert len(set(tried)) == len(tried) <= 13
    assert not found or found in tried


def test_gaps_between_kernels() -> None:
    spans = [(0.0, 2.0), (1.0, 1.5), (3.0, 4.0), (4.0, 5.0), (5.5, 6.0)]
    random.Random(0).shuffle(spans)
    assert gaps_ms(spans) == 1.5
    assert gaps_ms([]) == 0


def test_kernels_are_what_ran_on_the_gpu() -> None:
    def event(name: str, device: DeviceType, start_us: float, end_us: float, note: bool = False) -> FunctionEvent:
        return FunctionEvent(0, name, 0, start_us, end_us, device_type=device, is_user_annotation=note)

    events = [
        event("cudaGraphLaunch", DeviceType.CPU, 0, 900),
        event("gemm", DeviceType.CUDA, 1000, 3000),
        event("Memcpy DtoH", DeviceType.CUDA, 4000, 4500),
        event("## Call CompiledFxGraph ##", DeviceType.CUDA, 1000, 4500, note=True),
    ]
    assert device_spans(events) == [("gemm", 1.0, 3.0), ("Memcpy DtoH", 4.0, 4.5)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_f16f16_f16f32_tn_n_tilesize128x128x64", "matrix products"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("pytorch_flash::flash_fwd_splitkv_kernel<...>", "attention"),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm80", "attention"),
        ("sm80_xmma_fprop_implicit_gemm_f32f32", "convolutions"),
        ("void at::native::elementwise_kernel<sin_kernel>", OTHER),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy", "copies"),
        ("void at::native::vectorized_layer_norm_kernel", OTHER),
        ("aten::addmm", "matrix products"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_shares_add_up() -> None:
    found = summary(Counter({"aten::addmm": 6.0, "aten::sin": 2.0}), Counter({"aten::addmm": 3, "aten::sin": 1}), 2.0)
    assert found["shares"]["matrix products"] == 0.6
    assert found["shares"]["gaps"] == 0.2
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["top"][0] == {"name": "aten::addmm", "ms": 6.0, "calls": 3, "share": 0.6}


def test_the_open_loop_ends_behind_the_knee() -> None:
    row = good()["server"]["rows"][0]
    rows = [row]
    rates = []
    for load in loads(rehearsal(ROOT), rows):
        rates.append(load.arrivals_per_s)
        rows.append({**row, "first_audio_ms": {"p99": 2000.0}} if load.arrivals_per_s >= 2 else row)
    assert [rate for rate in rates if rate] == [0.5, 1.0, 2.0]
    assert past_knee({**row, "failed": ["streams: all are in use"]})
    assert past_knee({**row, "first_audio_ms": {"p99": float("nan")}})


def test_the_servers_settings_lie_over_each_other() -> None:
    common = {"stream": {"left_blocks": 2}, "limits": {"streams": 9}}
    assert server_settings("no batching", common, 0.5) == {
        "stream": {"hop": "lead", "left_blocks": 2},
        "limits": {"player_buffer_seconds": 0.5, "streams": 9, "batch_streams": 1},
    }
    assert LEAN.stream.left_blocks == 2
