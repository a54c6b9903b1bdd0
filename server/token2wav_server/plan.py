"""Command `token2wav plan`: computes how many streams a GPU can serve, and the limiting resource.

docs/scaling.md has an example.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from token2wav.cache.paged_kv_cache import Storage
from token2wav.commands import CommandParser
from token2wav.config import LimitConfig, StreamConfig
from token2wav.config.values import number
from token2wav.errors import ConfigError, Token2WavError
from token2wav.hub import MODEL_HELP, model_folder
from token2wav.model import config_under
from token2wav.serving.policy import chunks_at_once
from token2wav_server.plan_graphs import NODE_BYTES, graph_nodes, vocoder_bytes
from token2wav_server.plan_memory import share_out, stream_needs, weight_bytes

PROGRAM = "token2wav plan"
_MIB = 1 << 20
_SECONDS = number(float, 0, 86400, "a number of seconds")
# Memory of each GPU in MiB, as `nvidia-smi` shows it.
GPU_MIB = {
    "T4": 15360,
    "A10": 23028,
    "L4": 23034,
    "RTX 4090": 24564,
    "A100 40GB": 40960,
    "L20": 46068,
    "L40S": 46068,
    "A100 80GB": 81920,
    "H100": 81559,
    "H200": 143771,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the plan, and returns the exit code: 2 if an argument cannot be used, else 0."""
    options = parser().parse_args(arguments)
    try:
        plan = make_plan(options)
    except Token2WavError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(plan, indent=1) if options.json else as_table(plan))
    return 0


def make_plan(options: argparse.Namespace) -> dict[str, Any]:
    """Computes all figures of the plan, as a dictionary for JSON.

    Raises:
        ConfigError: the model folder, a setting or the file given with `--costs` cannot be used.
    """
    stream = StreamConfig(
        left_blocks=options.left_blocks,
        max_hop_tokens=options.max_hop_tokens,
        block_tokens=options.block_tokens,
    )
    model = config_under(model_folder(options.model, "config"), stream)
    rate = model.token_frame_rate
    prompt = round(options.prompt_seconds * rate) if model.takes_prompt else 0
    length = max(1, round(options.stream_seconds * rate))
    compute = None if options.costs is None else measured_streams(options.costs, rate)
    storage = options.precision if options.storage == "auto" else options.storage
    needs = stream_needs(model, stream, storage, prompt, length)
    unmeasured = (
        "not measured; run make gpu-check on the GPU, and pass its report.json with --costs"
    )
    if compute is not None and not _is_of(compute["gpu"], options.gpu):
        gpu = compute["gpu"] or "a computer without a GPU"
        unmeasured = f"not measured on this GPU; {options.costs} was measured on {gpu}"
        compute = None
    nodes, vocoder = graph_nodes(model, stream), vocoder_bytes(model, stream)
    graphs = 0 if compute is None else compute["graph_mib"] * _MIB
    if graphs:  # measured, with the tensors of the vocoder's graphs
        vocoder = min(vocoder, graphs)
    memory = share_out(
        (options.memory_mib or GPU_MIB[options.gpu]) * _MIB,
        options.used_mib * _MIB,
        weight_bytes(model, options.precision),
        options.cache_mib * _MIB,
        needs,
        options.voices,
        chunks_at_once(model, options.batch_streams),
        graphs - vocoder if graphs else nodes * NODE_BYTES,
        vocoder,
    )
    best = memory.streams if compute is None else max(compute["streams"].values())
    return {
        "model": options.model,
        "gpu": options.gpu,
        "prompt_tokens": prompt,
        "stream_tokens": length,
        "left_blocks": model.window(stream),
        "storage": storage,
        # vocoders and codecs stay in float32
        "precision": options.precision if "flow" in model.stages else "float32",
        "voices": options.voices,
        "batch_streams": options.batch_streams,
        "chunks": chunks_at_once(model, options.batch_streams),
        "graphs": "measured" if graphs else f"estimated for {nodes:,} nodes",
        "stream": {**asdict(needs), "bytes": needs.pages * needs.page_bytes + needs.context_bytes},
        "bytes_per_second_of_audio": round(needs.page_bytes * rate / model.block_tokens),
        "memory": asdict(memory),
        "compute": compute,
        "unmeasured": None if compute else unmeasured,
        "streams": min(best, memory.streams),
        "binds": "compute" if best < memory.streams else memory.binds,
    }


def measured_streams(report: Path, token_rate: float) -> dict[str, Any]:
    """Reads from a GPU's report how many streams the GPU serves in real time.

    The figures are measured, not estimated. They come from the rows of the report with the longest
    chunks, and among these with the longest history. They assume that the GPU spends no time on
    anything else.

    Args:
        report: `report.json` of `make gpu-check`.
        token_rate: tokens per second of audio.

    Returns:
        The GPU, the model, the chunk length and the history of the measurement. `streams` maps the
        streams in a batch to the streams that run in real time. `graph_mib` is
        the memory that the CUDA graphs took, in MiB; 0 if it was not measured.

    Raises:
        ConfigError: the file is not such a report.
    """
    try:
        content = json.loads(report.read_bytes())
        [result] = content["results"]
        hop, history_s = max((row["hop_tokens"], row["history_s"]) for row in result["rows"])
        rows = [
            row
            for row in result["rows"]
            if (row["hop_tokens"], row["history_s"]) == (hop, history_s)
        ]
        return {
            "gpu": str(content["gpu"] or ""),
            "model": f"{result['model']} in {result['case']['precision']}",
            "hop_tokens": hop,
            "history_s": history_s,
            "streams": {
                row["streams"]: int(row["streams"] * hop / token_rate / row["total_ms"][0] * 1000)
                for row in rows
            },
            "graph_mib": max((row.get("graph_mib", 0) for row in content["rows"]), default=0),
        }
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"costs: {report} is not a report.json of make gpu-check ({error!r})"
        ) from None


def _is_of(measured: str, gpu: str | None) -> bool:
    """Returns whether the GPU of a report is the GPU of the plan.

    The names are compared by whole words, so that "NVIDIA L40S" does not match "L4".
    """
    words = re.findall(r"\w+", measured)
    return bool(words) and set((gpu or "").split()) <= set(words)


def as_table(plan: dict[str, Any]) -> str:
    """Formats the plan for a terminal."""
    rows = [("model", plan["model"]), *_stream_rows(plan), *_memory_rows(plan)]
    if plan["compute"] is None:
        rows.append(("compute", plan["unmeasured"]))
    else:
        rows += _compute_rows(plan["compute"])
    rows.append(("streams", f"{plan['streams']}; limited by {plan['binds']}"))
    # Memory alone recommends no limit, because compute may set a lower one.
    usual = LimitConfig().streams
    if plan["compute"] is not None and plan["streams"] > usual:
        rows.append(("", f"set limits.streams to this number; its default is {usual}"))
    return "\n".join(f"{name:11} {text}".rstrip() for name, text in rows)


def _stream_rows(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    stream, past_blocks = plan["stream"], plan["left_blocks"]
    size = _mib(stream["bytes"])
    if not stream["page_bytes"]:
        yield "stream", f"{plan['stream_tokens']} tokens, with a state of fixed size"
        yield "a stream", size
        return
    window = "all past blocks" if past_blocks < 0 else f"the prompt and {past_blocks} past blocks"
    yield (
        "stream",
        f"{plan['stream_tokens']} tokens after a prompt of {plan['prompt_tokens']} tokens; "
        f"attention reads {window}",
    )
    second = _mib(plan["bytes_per_second_of_audio"])
    yield "cache", f"{plan['storage']}, {second} per second of audio"
    yield "a stream", f"{stream['pages']} pages of {_mib(stream['page_bytes'])}, {size} in all"
    if stream["chunk_pages"]:
        yield (
            "a chunk",
            f"{stream['chunk_pages']} more pages while it is computed; "
            f"{plan['chunks']} chunks at a time",
        )
    yield "a voice", f"{stream['prompt_pages']} pages, shared; {plan['voices']} voices"


def _memory_rows(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    memory = plan["memory"]
    gpu = "" if plan["gpu"] is None else f"{plan['gpu']} "
    yield (
        "GPU",
        f"{gpu}{_mib(memory['total'])} in total, of which CUDA and other programs use "
        f"{_mib(memory['taken'])}",
    )
    yield "  weights", f"{_mib(memory['weights'])} in {plan['precision']}"
    if memory["vocoder"]:
        yield "  vocoder", f"{_mib(memory['vocoder'])} for the tensors of its graphs, estimated"
    if plan["stream"]["page_bytes"]:
        yield "  cache", _mib(memory["cache"])
    if memory["graphs"]:
        yield "  graphs", f"{_mib(memory['graphs'])}, {plan['graphs']}"
    rest = _mib(memory["rest"])
    yield "  the rest", f"{rest} for batches and activations, which are not measured"
    full = f"{memory['streams']} streams at their full length"
    yield "memory", f"{full}; limited by {memory['binds']}"


def _compute_rows(compute: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield (
        "compute",
        f"{compute['gpu']}, {compute['model']}, chunks of {compute['hop_tokens']} tokens after "
        f"{compute['history_s']:g} s:",
    )
    for batch, streams in compute["streams"].items():
        yield "", f"{batch} streams in a batch: {streams} streams in real time"


def _mib(size: int) -> str:
    return f"{size / _MIB:,.1f} MiB" if size < 100 * _MIB else f"{size / _MIB:,.0f} MiB"


def parser() -> CommandParser:
    """Returns the parser of `token2wav plan`."""
    parser = CommandParser(
        prog=PROGRAM,
        description="Compute how many streams a GPU can serve, and whether memory or compute sets "
        "the limit. Memory is counted as the server counts it; compute comes from a "
        "measurement (--costs).",
    )
    parser.add_argument(
        "--model", metavar="MODEL", required=True, help=f"{MODEL_HELP}; weight files are not needed"
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--gpu", choices=GPU_MIB, help="GPU model, which sets the size of the memory")
    size.add_argument(
        "--memory-mib",
        type=number(int, 1),
        metavar="N",
        help="memory of the GPU in MiB, for GPUs that --gpu does not list",
    )
    for option, seconds, text in (
        ("--prompt-seconds", 3.0, "length of a voice's prompt in seconds (default: 3)"),
        ("--stream-seconds", 30.0, "length of a stream's audio in seconds (default: 30)"),
    ):
        parser.add_argument(option, type=_SECONDS, default=seconds, metavar="S", help=text)
    for option, default, text in (
        ("--used-mib", 0, "memory used by CUDA itself and other programs, in MiB (default: 0)"),
        ("--voices", 1, "number of voices in use at the same time (default: 1)"),
        (
            "--batch-streams",
            LimitConfig().batch_streams,
            "setting limits.batch_streams of the server, times the batches that it computes at the "
            "same time; a GPU computes one "
            f"(default: {LimitConfig().batch_streams})",
        ),
        (
            "--max-hop-tokens",
            0,
            "setting stream.max_hop_tokens of the server (default: the value of the model)",
        ),
        (
            "--block-tokens",
            0,
            "setting stream.block_tokens of the server (default: the value of the model)",
        ),
        (
            "--cache-mib",
            0,
            "setting runtime.cache_mib of the server (default: 0, the share that the server "
            "chooses)",
        ),
    ):
        parser.add_argument(option, type=number(int), default=default, metavar="N", help=text)
    parser.add_argument(
        "--left-blocks",
        type=int,
        metavar="W",
        help="setting stream.left_blocks of the server (default: the value of the model)",
    )
    parser.add_argument(
        "--precision",
        choices=("float16", "float32"),
        default="float16",
        help="precision of the weights (default: float16)",
    )
    parser.add_argument(
        "--storage",
        choices=("auto", *get_args(Storage)),
        default="auto",
        help="setting runtime.cache_storage of the server (default: auto)",
    )
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="JSON",
        help="report.json of make gpu-check, measured on this GPU with a model of this size",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    return parser
