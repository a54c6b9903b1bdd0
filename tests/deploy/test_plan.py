"""`token2wav-plan`: its memory is what real engines take, its compute what was measured, and nothing is made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.execution.rig import CheapSolver, FlowStream, Parts, a_voice, portions, some_tokens
from tests.support.golden import TINY
from token2wav import StreamConfig, Token2Wav
from token2wav.cache.paged_kv_cache import PagedKVCache, Storage
from token2wav.execution.cached_flow import CachedFlow
from token2wav.families.cosyvoice3.build import cache_layout
from token2wav.families.cosyvoice3.config import CosyVoice3Config
from token2wav.families.cosyvoice3.weights import load_hift
from token2wav_server.plan import main
from token2wav_server.plan_memory import StreamNeeds, share_out, stream_needs, weight_bytes

GIB = 2**30
FULL = TINY.parent / "full_size"
ROWS = [(0, 25, 1, 40.0), (10, 25, 4, 90.0), (10, 100, 1, 100.0), (10, 100, 4, 200.0), (30, 100, 4, 250.0)]


@pytest.fixture(scope="module")
def parts() -> Parts:
    return Parts.load()


def speak_side_by_side(
    parts: Parts, engine: CachedFlow, stream: StreamConfig, prompt_tokens: int, tokens: int, count: int
) -> int:
    """Speaks in `count` streams at once, tokens coming bit by bit; returns the most pages that were in use."""
    streams = [FlowStream(engine, a_voice(prompt_tokens), parts.config, stream) for _ in range(count)]
    most = engine.pool.used
    for portion in portions(some_tokens(tokens), [40]):
        for each in streams:
            each.push(portion)
            most = max(most, engine.pool.used)
    for each in streams:
        each.finish()
    most = max(most, engine.pool.used)
    for each in streams:
        each.close()
    return most


@pytest.mark.parametrize("storage", ["float32", "int8"])
@pytest.mark.parametrize("left_blocks", [-1, 0, 8])
@pytest.mark.parametrize(("prompt_tokens", "tokens"), [(0, 1), (0, 300), (75, 10), (80, 260), (99, 603)])
def test_pages_are_those_of_real_engines(
    parts: Parts, storage: Storage, left_blocks: int, prompt_tokens: int, tokens: int
) -> None:
    stream, count = StreamConfig(left_blocks=left_blocks), 3
    needs = stream_needs(parts.config, stream, storage, prompt_tokens, tokens)
    engine = parts.incremental(256, storage=storage, left_blocks=left_blocks, solver=CheapSolver())
    most = speak_side_by_side(parts, engine, stream, prompt_tokens, tokens, count)
    assert most == needs.prompt_pages + count * needs.pages
    assert engine.usage().page_bytes == needs.page_bytes


def test_as_many_streams_fit_as_planned_and_not_one_more(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = stream_needs(parts.config, StreamConfig(), "float32", 80, 260)
    cache = 60 * needs.page_bytes
    plan = share_out(1 << 30, 0, weight_bytes(parts.config, "float32"), cache, needs, voices=1)
    assert plan.streams == (60 - needs.prompt_pages) // needs.pages
    assert _recomputing(parts, plan.streams, monkeypatch) == 0
    assert _recomputing(parts, plan.streams + 1, monkeypatch) > 0


def _recomputing(parts: Parts, streams: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many of so many streams had to go on without a cache of 60 pages."""
    engine, seen = parts.incremental(60, solver=CheapSolver()), []
    resume = engine._recompute.resume

    def noted(*arguments: Any) -> int:
        seen.append(arguments)
        return resume(*arguments)

    monkeypatch.setattr(engine._recompute, "resume", noted)
    speak_side_by_side(parts, engine, StreamConfig(), 80, 260, streams)
    return len(seen)


@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
def test_a_page_is_as_large_as_in_the_store(parts: Parts, storage: Storage) -> None:
    layout = cache_layout(parts.config.flow, storage)
    store = PagedKVCache(layout, 3, torch.device("cpu"))
    tensors = [store._data] + ([] if store._scales is None else [store._scales])
    assert sum(tensor.nbytes for tensor in tensors) == (3 + 2) * layout.page_bytes
    assert stream_needs(parts.config, StreamConfig(), storage, 0, 25).page_bytes == layout.page_bytes


def test_weights_and_contexts_are_those_of_a_loaded_model() -> None:
    model, config = Token2Wav.load(TINY), CosyVoice3Config.read(TINY)
    flow, hift = model.pipeline.flow, load_hift(TINY, config)
    modulation = next(iter(flow._runners.values())).step.tables.modulation  # type: ignore[attr-defined]
    loaded = [*flow._encoder.state_dict().values(), *hift.state_dict().values()]  # type: ignore[attr-defined]
    tables = [tensor for step in modulation for tensor in _tensors(step)]
    assert weight_bytes(config, "float32") == sum(tensor.nbytes for tensor in [*loaded, *tables])
    handle = flow.open(a_voice(30))
    conv_state = flow._streams[handle].conv_state  # type: ignore[attr-defined]
    assert stream_needs(config, StreamConfig(), "float32", 30, 50).context_bytes == conv_state.nbytes
    flow.close(handle)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    fields = vars(value).values() if hasattr(value, "__dict__") else value
    return [tensor for each in fields for tensor in _tensors(each)]


def test_public_size_in_float16_takes_ninety_megabytes_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(FULL), "--gpu", "L4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["bytes_per_second_of_audio"] == 2 * 22 * 16 * 64 * 2 * 10 * 2 * 50
    assert plan["binds"] == "cache pages"
    assert plan["compute"]["measured"] == []
    assert plan["compute"]["problem"].startswith("not measured on this GPU")


@pytest.mark.parametrize(
    ("cache", "free", "streams", "binds"),
    [
        (0, 1000, 7, "cache pages"),
        (990, 1000, 0, "memory beside the cache, for streams' contexts"),
        (0, 0, 0, "weights"),
    ],
)
def test_what_binds(cache: int, free: int, streams: int, binds: str) -> None:
    needs = StreamNeeds(page_bytes=10 * GIB, prompt_pages=3, pages=11, context_bytes=20 * GIB)
    plan = share_out((100 + 50 + free) * GIB, 50 * GIB, 100 * GIB, cache * GIB, needs, voices=1)
    assert (plan.streams, plan.binds) == (streams, binds)


def measurements(folder: Path) -> Path:
    rows = [
        {"history_s": history, "hop_tokens": hop, "streams": streams, "flow_ms": [ms, 0, 0], "vocoder_ms": [10.0, 0, 0]}
        for history, hop, streams, ms in ROWS
    ]
    case = {"engine": "torch", "precision": "float16", "graphs": True}
    path = folder / "gpu_check.json"
    path.write_text(json.dumps({"gpu": "NVIDIA L4", "results": [{"model": "full", "case": case, "rows": rows}]}))
    return path


def test_compute_binds_where_it_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--model", str(TINY), "--costs", str(measurements(tmp_path))]
    assert main([*common, "--gpu", "L4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    [measured] = plan["compute"]["measured"]  # the longest chunks at the longest history within the stream's
    assert (measured["history_s"], measured["batch"], measured["seconds"]) == (30, 4, 0.26)
    assert (plan["streams"], plan["binds"]) == (int(4 * 4.0 / 0.26), "compute")
    assert main([*common, "--gpu", "L4", "--stream-seconds", "9", "--json"]) == 0
    shorter = json.loads(capsys.readouterr().out)["compute"]["measured"]
    assert [row["batch"] for row in shorter] == [1, 4]
    assert main([*common, "--gpu", "H100"]) == 0
    assert "is of NVIDIA L4" in capsys.readouterr().out
    assert main([*common, "--gpu", "L4", "--measured-as", "small"]) == 0
    assert "has nothing of 'small'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "nowhere: no such model folder"),
        (["--model", str(TINY), "--left-blocks", "-2"], "stream.left_blocks: -2 is below -1"),
        (["--model", str(TINY), "--max-hop-tokens", "30"], "max_hop_tokens: 30 is not a multiple"),
        (["--model", str(TINY), "--costs", str(TINY / "cosyvoice3.yaml")], "is no result of make gpu-check"),
    ],
)
def test_errors_are_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpu", "L4", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
