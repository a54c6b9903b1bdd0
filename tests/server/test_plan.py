"""`token2wav plan`: memory equals that of real engines, and compute comes from measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.environment import RESULTS
from benchmarks.gpu.report import write_report
from benchmarks.gpu.settings import SETTINGS
from testkit.models.codec_models import CODECS
from testkit.models.cosyvoice2_model import write_yaml
from testkit.models.family_golden import FamilyGolden
from testkit.models.folders import write_folder
from testkit.models.golden import TINY
from testkit.models.sized import public_configs
from testkit.models.yaml_edits import edit_text
from testkit.utterances import a_voice, portions, some_tokens
from testkit.window_memory import kept_bytes
from tests.benchmarks.test_gpu_report import chunk, good, row
from tests.stages.rig import CheapSolver, FlowStream, Parts
from token2wav import ConfigError, LimitError, StreamConfig, Token2Wav
from token2wav.assembly import load_network
from token2wav.cache.paged_kv_cache import Storage
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.stages.cached_flow import CachedFlow
from token2wav_server.plan import main
from token2wav_server.plan_graphs import graph_nodes, vocoder_bytes
from token2wav_server.plan_memory import StreamNeeds, share_out, stream_needs, weight_bytes

GIB = 2**30
FULL = TINY.parent / "full_size"
# Streams, tokens of a chunk, seconds spoken before, milliseconds.
ROWS = [(4, 25, 30.0, 90.0), (4, 100, 10.0, 150.0), (1, 100, 30.0, 200.0), (4, 100, 30.0, 260.0)]


@pytest.fixture(scope="module")
def parts() -> Parts:
    return Parts.load()


def speak_side_by_side(
    parts: Parts,
    engine: CachedFlow,
    stream: StreamConfig,
    prompt_tokens: int,
    tokens: int,
    count: int,
) -> int:
    """Runs `count` streams at once, with tokens in portions.

    Returns:
        The largest number of pages in use.
    """
    streams = [
        FlowStream(engine, a_voice(prompt_tokens), parts.config, stream) for _ in range(count)
    ]
    most = engine.pool.used
    for portion in portions(some_tokens(tokens), [40]):
        for open_stream in streams:
            open_stream.push(portion)
            most = max(most, engine.pool.used)
    for open_stream in streams:
        open_stream.finish()
    most = max(most, engine.pool.used)
    for open_stream in streams:
        open_stream.close()
    return most


@pytest.mark.parametrize("left_blocks", [-1, 0, 8])
@pytest.mark.parametrize(
    ("storage", "prompt_tokens", "tokens"),
    [
        ("float32", 0, 1),
        ("float32", 0, 300),
        ("float16", 75, 10),
        ("int8", 80, 260),
        ("float8", 30, 40),
        ("float32", 99, 603),
    ],
)
def test_planned_pages_equal_the_pages_of_engines(
    parts: Parts, storage: Storage, left_blocks: int, prompt_tokens: int, tokens: int
) -> None:
    stream, count = StreamConfig(left_blocks=left_blocks), 3
    needs = stream_needs(parts.config, stream, storage, prompt_tokens, tokens)
    engine = parts.incremental(256, storage=storage, left_blocks=left_blocks, solver=CheapSolver())
    most = speak_side_by_side(parts, engine, stream, prompt_tokens, tokens, count)
    assert most == needs.prompt_pages + count * (needs.pages + needs.chunk_pages)
    assert engine.usage().page_bytes == needs.page_bytes


def test_planned_streams_with_a_window_open_and_no_more(parts: Parts) -> None:
    stream = StreamConfig(left_blocks=1, max_hop_tokens=25)
    needs = stream_needs(parts.config, stream, "float32", 80, 260)
    assert (needs.pages, needs.chunk_pages) == (1, 3)
    plan = share_out(1 << 30, 0, 0, 20 * needs.page_bytes, needs, voices=1, chunks=2)
    assert plan.streams == 20 - needs.prompt_pages - 2 * needs.chunk_pages
    engine = parts.incremental(20, left_blocks=1, longest_hop=25, solver=CheapSolver())
    engine.limit_chunks(2)
    for _ in range(plan.streams):
        engine.open(a_voice(80))
    with pytest.raises(LimitError, match="try again later"):
        engine.open(a_voice(80))


def test_planned_weights_and_contexts_equal_a_loaded_model() -> None:
    model, config = Token2Wav.load(TINY), CosyVoice3Config.read(TINY)
    flow, hift = model.pipeline.flow, load_network(TINY, config, "vocoder")
    modulation = next(iter(flow._runners.values())).step.tables.modulation
    loaded = [*flow._encoder.state_dict().values(), *hift.state_dict().values()]
    tables = [tensor for step in modulation for tensor in _tensors(step)]
    assert weight_bytes(config, "float32") == sum(tensor.nbytes for tensor in [*loaded, *tables])
    needs = stream_needs(config, StreamConfig(), "float32", 30, 50)
    assert needs.context_bytes == flow.states.slot_bytes


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    fields = vars(value).values() if hasattr(value, "__dict__") else value
    return [tensor for field in fields for tensor in _tensors(field)]


def test_public_size_in_float16_takes_ninety_megabytes_a_second(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--model", str(FULL), "--gpu", "L4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["bytes_per_second_of_audio"] == 2 * 22 * 16 * 64 * 2 * 10 * 2 * 50
    assert plan["binds"] == "cache pages"
    assert plan["compute"] is None
    assert main(["--model", str(FULL), "--gpu", "L4"]) == 0
    assert "compute     not measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cache", "free", "streams", "binds"),
    [
        (0, 1000, 7, "cache pages"),
        (990, 1000, 0, "memory outside the cache, for the state of each stream"),
        (0, 0, 0, "weights"),
    ],
)
def test_binding_resource(cache: int, free: int, streams: int, binds: str) -> None:
    needs = StreamNeeds(10 * GIB, prompt_pages=3, pages=11, chunk_pages=0, context_bytes=20 * GIB)
    total = (100 + 50 + free) * GIB
    plan = share_out(total, 50 * GIB, 100 * GIB, cache * GIB, needs, voices=1, chunks=8)
    assert (plan.streams, plan.binds) == (streams, binds)


def test_graphs_and_tensors_of_the_vocoder_leave_less_room() -> None:
    needs = StreamNeeds(GIB, prompt_pages=1, pages=1, chunk_pages=0, context_bytes=GIB)
    for graphs, streams in ((0, 20), (5, 15), (50, 0)):
        plan = share_out(100 * GIB, 0, 0, 80 * GIB, needs, voices=1, chunks=8, graphs=graphs * GIB)
        assert (plan.graphs, plan.streams) == (min(graphs, 20) * GIB, streams)
    needs = StreamNeeds(GIB, prompt_pages=0, pages=1, chunk_pages=0, context_bytes=1)
    for vocoder, cache in ((0, 80), (50, 40), (200, 0)):
        plan = share_out(100 * GIB, 0, 0, 0, needs, voices=1, chunks=8, vocoder=vocoder * GIB)
        assert (plan.cache, plan.streams) == (cache * GIB, cache)
    # of the public size: 64 first chunks of 100 frames with 5 frames of look-ahead
    assert vocoder_bytes(CosyVoice3Config.read(FULL), StreamConfig()) == 64 * 105 * 707_000


@pytest.mark.parametrize("family", ["StreamFlow", "Qwen2.5-Omni"])
def test_a_flow_of_windows_stores_no_pages(family: str) -> None:
    short, long = (
        stream_needs(public_configs()[family], StreamConfig(), "float16", 0, tokens)
        for tokens in (50, 5000)
    )
    assert short == long
    assert short.page_bytes == short.pages == 0
    assert 100_000 < short.context_bytes < 10_000_000  # states of the vocoder


# Nodes of the CUDA graphs of each family, as `lab.launches.table` counts them.
COUNTED = json.loads((RESULTS / "launches.json").read_text())["rows"]


@pytest.mark.parametrize("family", [*public_configs()])
def test_estimated_nodes_are_close_to_the_counted_launches(family: str) -> None:
    model = public_configs()[family]
    [counts] = [
        entry
        for entry in COUNTED
        if entry["family"] == family and entry["streams"] == 1 and entry["spoken_s"] == 0.0
    ]
    captured = {name: stage["captured"] for name, stage in counts["stages"].items()}
    nodes = graph_nodes(model, StreamConfig(first_tokens=0))
    sizes = 6 if family in ("StreamFlow", "Qwen2.5-Omni") else 11
    counted = sizes * (captured.get("encoder", 0) + captured["flow"])
    if family in (
        "BigVGAN",
        "StreamFlow",
        "Qwen2.5-Omni",
    ):  # a first chunk may be shorter than its shortest graph
        assert nodes > counted + 12 * counts["stages"]["vocoder"]["launches"]
    else:
        assert nodes == pytest.approx(counted + 13 * captured["vocoder"], rel=0.05)
    # Provisional chunks have graphs of their own, with fewer ODE steps, for 7 of the 11 sizes.
    share = model.provisional_steps(StreamConfig(), model.ode_steps) / model.ode_steps
    provisional = 7 * share * captured["flow"] if share < 1 else 0
    assert graph_nodes(model, StreamConfig()) - nodes == pytest.approx(provisional, rel=0.05)


def test_600_lean_streams_of_20_seconds_fit_into_139_gigabytes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream, storage = SETTINGS["lean"]
    lean = ["--storage", storage, "--left-blocks", str(stream.left_blocks)]
    lean += ["--max-hop-tokens", str(stream.max_hop_tokens), "--batch-streams", "64"]
    size = ["--memory-mib", str(139 * 10**9 >> 20), "--stream-seconds", "20"]
    assert main(["--model", str(FULL), *size, *lean, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["streams"] >= 600
    assert plan["memory"]["graphs"] > 2**30
    assert plan["graphs"].startswith("estimated for 24,")
    assert plan["chunks"] == 64 + 8  # and first chunks that interrupt the batch


def report_in(folder: Path, gpu: str | None = "NVIDIA H200") -> Path:
    rows = [chunk(*measured) | {"history_s": measured[2] + 3.0} for measured in ROWS]
    rows.append(row("chunks", "the model", graphs=34, graph_nodes=19_806, graph_mib=700))
    write_report(good() | {"rows": rows}, folder)
    path = folder / "report.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"gpu": gpu}))
    return path


def test_compute_binds_where_it_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--model", str(TINY), "--gpu", "H200", "--costs", str(report_in(tmp_path))]
    assert main([*common, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    # The longest chunks after the longest history.
    assert (plan["compute"]["hop_tokens"], plan["compute"]["history_s"]) == (100, 33.0)
    assert plan["compute"]["streams"] == {"1": int(4.0 / 0.2), "4": int(4 * 4.0 / 0.26)}
    assert (plan["streams"], plan["binds"]) == (int(4 * 4.0 / 0.26), "compute")
    assert main(common) == 0
    table = capsys.readouterr().out
    assert "NVIDIA H200, full in float16, chunks of 100 tokens after 33 s" in table
    assert "MiB, measured" in table
    # The measured memory of the graphs includes the tensors of the vocoder's graphs.
    assert plan["memory"]["vocoder"] > 0
    assert plan["memory"]["vocoder"] + plan["memory"]["graphs"] == 700 << 20
    assert "61; limited by compute" in table


@pytest.mark.parametrize(
    ("measured", "planned", "reason"),
    [
        ("NVIDIA L4", ["--gpu", "L4"], None),
        ("NVIDIA A100-SXM4-40GB", ["--gpu", "A100 40GB"], None),
        ("NVIDIA RTX A4000", ["--memory-mib", "16376"], None),
        ("NVIDIA L40S", ["--gpu", "L4"], "report.json was measured on NVIDIA L40S"),
        (
            "NVIDIA A100 80GB PCIe",
            ["--gpu", "A100 40GB"],
            "report.json was measured on NVIDIA A100 80GB PCIe",
        ),
        (None, ["--gpu", "L4"], "report.json was measured on a computer without a GPU"),
        (None, ["--memory-mib", "16376"], "report.json was measured on a computer without a GPU"),
    ],
)
def test_a_report_of_another_gpu_is_left_out(
    measured: str | None,
    planned: list[str],
    reason: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", str(TINY), *planned, "--costs", str(report_in(tmp_path, measured))]
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["compute"] is None) == (reason is not None) == (plan["binds"] != "compute")
    expected = None if reason is None else f"not measured on this GPU; {tmp_path}/{reason}"
    assert plan["unmeasured"] == expected


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_takes_what_its_engine_takes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(name, tmp_path)
    model = Token2Wav.load(folder)
    network, config = load_network(folder, model.config, "decoder"), model.config
    if CODECS[name].windows:
        windows = config.windows  # type: ignore[attr-defined]
        state = kept_bytes(model, windows.block * max(1, windows.past // windows.block))
    else:
        [decoder] = model.pipeline.stages.values()
        state = decoder.store.slot_bytes  # type: ignore[attr-defined]
    weights = sum(tensor.nbytes for tensor in network.state_dict().values())

    common = ["--model", str(folder), "--memory-mib", "1000", "--used-mib", "0"]
    assert main([*common, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["stream"]["bytes"] == state
    assert plan["prompt_tokens"] == 0
    assert plan["memory"]["weights"] == weights
    assert plan["streams"] == ((1000 << 20) - weights) // state
    assert main(common) == 0
    assert "tokens, with a state of fixed size" in capsys.readouterr().out


def test_blocks_of_the_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is that of a model whose file has these blocks."""
    for name, old, new in (
        ("dynamic", "macaron", "use_dynamic_chunk: True\n        macaron"),
        ("edited", "chunk_size: 25", "chunk_size: 10"),
    ):
        edit_text(write_yaml(tmp_path / name, FamilyGolden("cosyvoice2", "tiny")), (old, new))
    plans = []
    for name, *options in (("edited",), ("dynamic", "--block-tokens=10"), ("dynamic",)):
        assert main(["--model", str(tmp_path / name), "--gpu", "L4", "--json", *options]) == 0
        plans.append(json.loads(capsys.readouterr().out) | {"model": ""})
    edited, chosen, usual = plans
    assert chosen == edited != usual


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "nowhere: no such model folder"),
        (
            ["--model", str(TINY), "--left-blocks", "-2"],
            "stream.left_blocks: -2 is not between -1 and 1000000",
        ),
        (["--model", str(TINY), "--max-hop-tokens", "30"], "max_hop_tokens: 30 is not a multiple"),
        (
            ["--model", str(TINY), "--costs", str(TINY / "cosyvoice3.yaml")],
            "is not a report.json of make gpu-check",
        ),
    ],
)
def test_errors_are_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--gpu", "L4", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize("family", ["cosyvoice1", "dac"])
def test_a_hop_that_a_load_refuses(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(family, tmp_path)
    with pytest.raises(ConfigError, match=r"^stream\.max_hop_tokens: 75 is not") as refused:
        Token2Wav.load(folder, stream=StreamConfig(max_hop_tokens=75))
    assert main(["--model", str(folder), "--gpu", "L4", "--max-hop-tokens", "75"]) == 2
    assert capsys.readouterr().err == f"token2wav plan: error: {refused.value}\n"
