"""Golden tensors of other families: results of their public code with random weights at two small
sizes.

Run it in the environment that `public_families.py` describes. Tests read its files and need none of
the packages:

    public/bin/python -m lab.golden.golden_families tests/data/families
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from lab.golden import public_families as public
from testkit.models.random_weights import SEED, fill

Golden = dict[str, torch.Tensor]

# ODE time of the estimator's evaluation; for MeanFlow the end of its step too
_TIME, _END = 0.3, 0.8
_VOCODED = 40  # frames that become audio
_STEPS = 10


def _drawn(name: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([SEED, name]).standard_normal(shape)).float()


def flow_noise(frames: int) -> torch.Tensor:
    """The noise that a stock CosyVoice2 or 3 starts from, (1, 80, frames)."""
    return torch.randn(1, 80, 15000, generator=torch.Generator().manual_seed(0))[:, :, :frames]


@contextmanager
def drawn_source() -> Iterator[None]:
    """Replaces the random numbers of a harmonic source, so that tests can draw them as well.

    Phases and noise are (rows, harmonics, ...) or (rows, samples, harmonics) as each source asks
    for them: uniform numbers of `default_rng([SEED, 5])`, normal ones of `default_rng([SEED, 6])`.
    """

    def rand(*shape: Any, **_: Any) -> torch.Tensor:
        size = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return torch.from_numpy(np.random.default_rng([SEED, 5]).random(tuple(size)))

    def randn_like(other: torch.Tensor, **_: Any) -> torch.Tensor:
        return _drawn(6, *other.shape).to(other)

    with patch("torch.rand", rand), patch("torch.randn_like", randn_like):
        yield


def inputs(prompt: int, tokens: int, ratio: float = 2, vocabulary: int = 6561) -> Golden:
    """Voice and tokens of an utterance, with `ratio` mel frames per token, rounded down."""
    random = np.random.default_rng([SEED, 1])
    return {
        "prompt_token": torch.from_numpy(random.integers(0, vocabulary, (1, prompt))),
        "token": torch.from_numpy(random.integers(0, vocabulary, (1, tokens))),
        "prompt_feat": _drawn(2, 1, int(ratio * prompt), 80),
        "embedding": _drawn(3, 1, 192),
    }


@contextmanager
def conditions(flow: Any) -> Iterator[list[torch.Tensor]]:
    """Conditions `mu` (1, 80, frames) of every call of a flow."""
    seen: list[torch.Tensor] = []
    hook = flow.encoder_proj.register_forward_hook(
        lambda *call: seen.append(call[2].transpose(1, 2).clone())
    )
    yield seen
    hook.remove()


def velocities(flow: Any, mu: torch.Tensor, utterance: Golden, **more: Any) -> torch.Tensor:
    """One evaluation of the estimator: conditional and unconditional branch, (2, 80, frames)."""
    frames, prompt = mu.shape[2], utterance["prompt_feat"].shape[1]
    cond = torch.zeros_like(mu)
    cond[:, :, :prompt] = utterance["prompt_feat"].transpose(1, 2)
    speaker = flow.spk_embed_affine_layer(nn.functional.normalize(utterance["embedding"], dim=1))
    both = [torch.cat((value, torch.zeros_like(value))) for value in (mu, speaker, cond)]
    x, mask, t = (
        flow_noise(frames).repeat(2, 1, 1),
        torch.ones(2, 1, frames),
        torch.full((2,), _TIME),
    )
    return flow.decoder.estimator(x, mask, both[0], t, both[1], both[2], **more)


def vocoded(hift: Any, mel: torch.Tensor, frames: int = _VOCODED) -> Golden:
    """Computes a vocoder's audio of the first frames of a mel, in double precision: its phase has
    1e4 rad soon.
    """
    mel = mel[:, :, :frames].contiguous()
    hift.double().stft_window = hift.stft_window.double()
    torch.set_default_dtype(torch.float64)
    with drawn_source():
        audio, source = (getattr(hift, "inference", None) or hift)(mel.double())
    torch.set_default_dtype(torch.float32)
    f0 = hift.f0_predictor(mel.double())
    return {"vocoder_mel": mel, "f0": f0.float(), "source": source.float(), "audio": audio.float()}


def _lengths(utterance: Golden) -> dict[str, torch.Tensor]:
    return {
        "token_len": torch.tensor([utterance["token"].shape[1]]),
        "prompt_token_len": torch.tensor([utterance["prompt_token"].shape[1]]),
        "prompt_feat_len": torch.tensor([utterance["prompt_feat"].shape[1]]),
    }


def cosyvoice2(sizes: public.Sizes, prompt: int) -> Golden:
    """mu and mel under the full mask and the streaming one; mel of chunks as the public loop cuts
    them.
    """
    flow, utterance = fill(public.cosyvoice2_flow(sizes)), inputs(prompt, 60)
    call = {**utterance, **_lengths(utterance)}
    golden: Golden = {}
    with conditions(flow) as seen:
        for name, streaming in (("full", False), ("streaming", True)):
            golden[f"mel_{name}"] = flow.inference(**call, streaming=streaming, finalize=True)[0]
            golden[f"mu_{name}"] = seen[-1]
            golden[f"velocity_{name}"] = velocities(flow, seen[-1], utterance, streaming=streaming)
    stop = -prompt % 25 + 25  # of the first chunk: with the prompt it fills whole blocks
    tokens = utterance["token"][:, : stop + 3]
    part = {**call, "token": tokens, "token_len": torch.tensor([stop + 3])}
    golden["mel_chunk"] = flow.inference(**part, streaming=True, finalize=False)[0]
    hift = fill(public.cosyvoice2_hift(sizes))
    return {**utterance, **golden, **vocoded(hift, golden["mel_streaming"])}


def moss_speech(sizes: public.Sizes, prompt: int) -> Golden:
    """mel under the full mask and the streaming one, and of a prefix of whole blocks."""
    prompt, block = prompt // 5, 5
    flow, utterance = fill(public.moss_speech_flow(sizes)), inputs(prompt, 18, ratio=4)

    def mel(count: int, *, streaming: bool, finalize: bool = True) -> torch.Tensor:
        part = {**utterance, "token": utterance["token"][:, :count]}
        call = {**part, **_lengths(part), "streaming": streaming, "finalize": finalize}
        result: torch.Tensor = flow.inference(**call)[0]
        return result

    return {
        **utterance,
        "mel_full": mel(18, streaming=False),
        "mel_streaming": mel(18, streaming=True),
        "mel_chunk": mel(-prompt % block + block + 3, streaming=True, finalize=False),
    }


def stepaudio2(sizes: public.Sizes, prompt: int) -> Golden:
    """mu and mel of the whole, under the full mask, and of chunks; mel of chunks with the public
    window as well.
    """
    flow, utterance = fill(public.stepaudio2_flow(sizes)), inputs(prompt, 115)
    flow.decoder.rand_noise = flow_noise(15000)
    golden: Golden = {}
    with conditions(flow) as seen:
        golden["mel_full"] = flow.inference(**utterance, **_lengths(utterance), n_timesteps=_STEPS)
        golden["mu_full"] = seen[-1]
        golden["velocity_full"] = velocities(flow, seen[-1], utterance)
    for name, window in (("streaming", False), ("windowed", True)):
        with conditions(flow) as seen:
            golden[f"mel_{name}"] = torch.cat(list(_chunks(flow, utterance, window)), dim=2)
            golden[f"mu_{name}"] = torch.cat(seen, dim=2)
    if sizes != public.TINY:  # HiFT at the small size is in the data of CosyVoice2
        return {**utterance, **golden}
    hift = fill(public.stepaudio2_hift(sizes))
    return {**utterance, **golden, **vocoded(hift, golden["mel_streaming"])}


def _chunks(flow: Any, utterance: Golden, window: bool) -> Iterator[torch.Tensor]:
    """Mel of chunks of 25 tokens; with the window caches are cut as the public `Token2wav.stream`
    cuts them.
    """
    silence, token = torch.full((1, 3), 4218), utterance["token"]
    prompt = utterance["prompt_feat"].shape[1]
    cache = flow.setup_cache(
        torch.cat((utterance["prompt_token"], silence), dim=1),
        utterance["prompt_feat"],
        utterance["embedding"],
        _STEPS,
    )
    for start in range(0, token.shape[1], 25):
        last = start + 25 >= token.shape[1]
        mel, cache = flow.inference_chunk(
            token[:, start : start + 28], utterance["embedding"], cache, last, _STEPS
        )
        for name, axis in (("estimator_att_cache", 4), ("conformer_att_cache", 3)):
            states = cache[name]
            if window and states.shape[axis] > prompt + 100:
                last_100 = states.narrow(axis, states.shape[axis] - 100, 100)
                cache[name] = torch.cat((states.narrow(axis, 0, prompt), last_100), dim=axis)
        yield mel.clone()


def chatterbox(sizes: public.Sizes, prompt: int) -> Golden:
    """mu and mel under the full mask, of the flow and of its MeanFlow variant."""
    utterance = inputs(prompt, 40)
    golden: Golden = {}
    call = {**utterance, **_lengths(utterance)}
    for name, meanflow in (("full", False), ("meanflow", True)):
        flow = fill(public.chatterbox_flow(sizes, meanflow=meanflow))
        steps = 2 if meanflow else _STEPS
        with (
            conditions(flow) as seen,
            patch("torch.randn_like", lambda mu: flow_noise(mu.shape[2])),
        ):
            mel = flow.inference(**call, finalize=True, n_timesteps=steps, meanflow=meanflow)[0]
        more = {"r": torch.full((2,), _END)} if meanflow else {}
        golden |= {
            f"mel_{name}": mel,
            f"velocity_{name}": velocities(flow, seen[-1], utterance, **more),
        }
        golden[f"mu_{name}"] = seen[-1]
    if sizes.vocoder != public.TINY.vocoder:  # as for Step-Audio2
        return {**utterance, **golden}
    hift = fill(public.chatterbox_hift(sizes))
    return {**utterance, **golden, **vocoded(hift, golden["mel_full"])}


def cosyvoice1(sizes: public.Sizes, prompt: int) -> Golden:
    """mel of an utterance with a prompt, whose ends are stretched apart from its middle, and of a
    short one without.
    """
    flow, hift = fill(public.cosyvoice1_flow(sizes)), fill(public.cosyvoice1_hift(sizes))
    utterance = inputs(prompt // 2, 43, 22050 / 256 / 50, vocabulary=4096)
    alone = {"prompt_token": torch.zeros(1, 0).long(), "prompt_feat": torch.zeros(1, 0, 80)}
    short = {**utterance, **alone, "token": utterance["token"][:, :7]}

    def mel(part: Golden) -> torch.Tensor:
        nothing = torch.zeros(1, 80, 0, 2)
        with patch("torch.randn_like", lambda mu: flow_noise(mu.shape[2])):
            result: torch.Tensor = flow.inference(**part, **_lengths(part), flow_cache=nothing)[0]
        return result

    whole = mel(utterance)
    audio = vocoded(hift, whole, 12)["audio"]
    return {**utterance, "mel_full": whole, "mel_short": mel(short), "audio": audio}


def glm4_voice(sizes: public.Sizes, prompt: int) -> Golden:
    """mel of an utterance, which has neither a prompt nor a speaker."""
    flow, tokens = fill(public.glm4_voice_flow(sizes)), inputs(0, 5, vocabulary=16384)["token"]
    call = {"token": tokens, "prompt_token": torch.zeros(1, 0).long()}
    call |= {"prompt_feat": torch.zeros(1, 0, 80), "embedding": torch.zeros(1, 192)}
    with patch("torch.randn_like", lambda mu: flow_noise(mu.shape[2])):
        mel = flow.inference(**call, **_lengths(call))
    return {"token": tokens, "mel_full": mel}


_FAMILIES: dict[str, Callable[[public.Sizes, int], Golden]] = {
    "cosyvoice1": cosyvoice1,
    "glm4_voice": glm4_voice,
    "cosyvoice2": cosyvoice2,
    "moss_speech": moss_speech,
    "stepaudio2": stepaudio2,
    "chatterbox": chatterbox,
}
_PACKAGES = [name for name in _FAMILIES if name != "glm4_voice"]  # families of installed packages
_PROMPTS = {"tiny": 25, "small": 32}  # tokens: whole blocks, and not


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", nargs="+", choices=_FAMILIES, default=_PACKAGES)
    options = parser.parse_args()
    folder: Path = options.folder
    public.prepare_imports()
    torch.set_num_threads(1)
    with torch.inference_mode():
        for family in options.family:
            for size, sizes in public.SIZES.items():
                if size == "small" and family in ("cosyvoice1", "glm4_voice"):  # large data
                    continue
                if family == "chatterbox":  # its code has fixed sizes: always 8 heads
                    sizes = replace(sizes, heads=8, dim_head=sizes.channels // 8)
                golden = {
                    name: value.squeeze(0).contiguous()
                    for name, value in _FAMILIES[family](sizes, _PROMPTS[size]).items()
                }
                (folder / family).mkdir(parents=True, exist_ok=True)
                path = folder / family / f"{size}.safetensors"
                save_file(golden, path, {"sizes": json.dumps(asdict(sizes)), "seed": str(SEED)})
                print(
                    path,
                    path.stat().st_size,
                    {name: tuple(value.shape) for name, value in golden.items()},
                )


if __name__ == "__main__":
    main()
