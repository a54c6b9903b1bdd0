"""Checks of a model with the settings of a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from token2wav_server.findings import Finding, error, ok, warning
from token2wav_server.gpu_findings import gpu

MEMORY_CHECK = "model's memory"
_SPEECH_SECONDS, _PROMPT_SECONDS = 30, 3  # of the streams that memory is counted for
_MIB = 1 << 20


def examine_model(folder: Path, config: Path | None) -> Iterator[Finding]:
    """Checks a model folder, its settings, the GPU and the memory, without reading weights whole.

    Raises:
        ConfigError: the folder or a setting cannot be used. The message gives the reason.
    """
    # These import torch.
    from token2wav.assembly import check_folder
    from token2wav.config import load_server_config
    from token2wav.execution.device import device_named
    from token2wav.model import check_settings
    from token2wav.published.registry import family_name, read_config
    from token2wav.serving.door.voice_registry import voices_in

    settings = load_server_config(config)
    device = device_named(settings.runtime.device)
    if device.type == "cuda":
        yield gpu(device)
    check_settings(folder, settings.stream, settings.runtime)
    computes = settings.runtime.backend != "pause"
    if computes:
        check_folder(folder)
    model = read_config(folder).with_stream_settings(settings.stream)
    voices_in(settings, model)
    yield ok(f"{family_name(model)}, on {device.type}: {folder}")
    if computes:
        yield _need(model, settings, device)
        return
    yield warning(
        "runtime.backend: pause sends a test signal in place of speech; remove it to serve clients",
        "backend",
    )


def _need(model: Any, settings: Any, device: Any) -> Finding:
    """Compares the need of the model with the free memory, as `token2wav plan` counts both."""
    import torch

    from token2wav.execution.device import available_bytes, cache_bytes
    from token2wav.serving.policy import chunks_at_once
    from token2wav.serving.worker import default_workers
    from token2wav_server.plan_memory import share_out, stream_needs, weight_bytes

    runtime = settings.runtime
    on_gpu = device.type == "cuda"
    precision = runtime.precision
    if precision == "auto":
        precision = "float16" if on_gpu else "float32"
    weights = weight_bytes(model, precision)
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else available_bytes()
    if weights > free:
        return error(
            f"the weights take {weights // _MIB:,} MiB, but {free // _MIB:,} MiB are free on "
            f"{device.type}; stop other programs, or use a machine with more memory",
            MEMORY_CHECK,
        )
    rate = model.token_frame_rate
    needs = stream_needs(
        model,
        settings.stream,
        precision if runtime.cache_storage == "auto" else runtime.cache_storage,
        round(_PROMPT_SECONDS * rate) if model.takes_prompt else 0,
        round(_SPEECH_SECONDS * rate),
    )
    pages = min(cache_bytes(runtime.cache_mib, device), free - weights)
    workers = runtime.workers or default_workers(device.type)
    chunks = chunks_at_once(model, settings.limits.batch_streams, workers)
    streams = share_out(free, 0, weights, pages, needs, voices=1, chunks=chunks).streams
    limit = settings.limits.streams
    if streams < limit:
        return warning(
            f"room for {streams} streams of {_SPEECH_SECONDS} s in {free // _MIB:,} MiB, but "
            f"limits.streams is {limit}; lower it"
            + (", or bound the past with stream.left_blocks" if needs.page_bytes else ""),
            MEMORY_CHECK,
        )
    text = f"room for {streams} streams of {_SPEECH_SECONDS} s; limits.streams is {limit}"
    return ok(text, MEMORY_CHECK)
