"""Training loop, which can be stopped and continued at any time, and logs its losses."""

from __future__ import annotations

import json
import math
import signal
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

_LOG_EVERY_STEPS = 10
_SAVE_EVERY_SECONDS = 180.0
_WARM_UP_STEPS = 100
_CLIP = 1.0
# The average covers the last tenth of the steps, and at most _AVERAGED_STEPS steps.
_AVERAGED_SHARE = 10
_AVERAGED_STEPS = 2000


class Training(ABC):
    """Training of one network.

    Attributes:
        name: stem of the names of checkpoint and log.
        network: module to train.
        learning_rate: highest learning rate, after the warm-up.
        full_rate_steps: steps after which the learning rate falls, with the inverse
            square root of the step.
        bfloat16: whether products may be computed in bfloat16, where the CPU has instructions for
            it. Spectra of the vocoder need float32.
    """

    name: str
    network: nn.Module
    learning_rate: float
    full_rate_steps = 2000
    bfloat16 = False

    @abstractmethod
    def losses(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Computes the losses of one random batch. The optimiser minimises `loss`."""


def crops(source: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """Cuts crops (B, length, ...) in float32 out of joined recordings (N, ...), at starts (B,)."""
    return source[(starts[:, None] + torch.arange(length)).to(source.device)].float()


class Average:
    """Exponential moving average of a network's weights."""

    def __init__(self, network: nn.Module) -> None:
        self.weights = {
            name: value.detach().clone() for name, value in network.state_dict().items()
        }

    @torch.no_grad()
    def update(self, network: nn.Module, step: int) -> None:
        keep = 1 - 1 / min(_AVERAGED_STEPS, 1 + step / _AVERAGED_SHARE)
        for name, value in network.state_dict().items():
            if value.is_floating_point():
                self.weights[name].lerp_(value, 1 - keep)
            else:
                self.weights[name].copy_(value)


class _Stop:
    """Stop condition: true after SIGTERM or Ctrl-C, and when the time is over."""

    def __init__(self, minutes: float) -> None:
        self._until = time.monotonic() + 60 * minutes
        self._asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, *_: object) -> None:
        self._asked = True

    def __bool__(self) -> bool:
        return self._asked or time.monotonic() >= self._until


def train(training: Training, folder: Path, *, minutes: float, steps: int | None) -> None:
    """Continues a training from its last checkpoint, until a limit is reached or SIGTERM arrives.

    Args:
        folder: folder of `NAME.pt` (network, average, optimiser, step) and of `NAME.jsonl`, a log
            with one line for every 10 steps.
        steps: further steps; None for no limit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    network, stop = training.network, _Stop(minutes)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=training.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    average = Average(network)
    checkpoint, log = folder / f"{training.name}.pt", folder / f"{training.name}.jsonl"
    step = _restore(checkpoint, network, average, optimizer)
    last = math.inf if steps is None else step + steps
    generator = torch.Generator().manual_seed(step)
    bfloat16 = training.bfloat16 and _multiplies_bfloat16()
    saved, sums, started = time.monotonic(), dict[str, float](), time.monotonic()
    with (
        tqdm(desc=training.name, unit="step", initial=step, mininterval=5) as bar,
        log.open("a", encoding="utf-8") as lines,
    ):
        while step < last and not stop:
            for group in optimizer.param_groups:
                group["lr"] = training.learning_rate * _rate(step, training.full_rate_steps)
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                losses = training.losses(generator)
            optimizer.zero_grad()
            losses["loss"].backward()
            nn.utils.clip_grad_norm_(network.parameters(), _CLIP)
            optimizer.step()
            step += 1
            average.update(network, step)
            for name, value in losses.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach()) / _LOG_EVERY_STEPS
            bar.update()
            if step % _LOG_EVERY_STEPS == 0:
                seconds = (time.monotonic() - started) / _LOG_EVERY_STEPS
                lines.write(
                    json.dumps(
                        {"step": step, "seconds_per_step": round(seconds, 3), **_rounded(sums)}
                    )
                    + "\n"
                )
                lines.flush()
                bar.set_postfix(loss=f"{sums['loss']:.3f}")
                sums, started = {}, time.monotonic()
            if time.monotonic() - saved > _SAVE_EVERY_SECONDS:
                _save(checkpoint, network, average, optimizer, step)
                saved = time.monotonic()
    _save(checkpoint, network, average, optimizer, step)


def averaged_weights(folder: Path, name: str) -> tuple[dict[str, torch.Tensor], int]:
    """Returns the averaged weights and the step of the newest checkpoint."""
    state = torch.load(folder / f"{name}.pt", map_location="cpu", weights_only=True)
    return state["average"], state["step"]


def trained_steps(folder: Path, name: str) -> int:
    """Returns the step of the newest checkpoint; 0 without a checkpoint."""
    return averaged_weights(folder, name)[1] if (folder / f"{name}.pt").exists() else 0


def _multiplies_bfloat16() -> bool:
    """Returns whether the CPU has instructions for bfloat16. Without them bfloat16 is slower."""
    if not hasattr(torch.cpu, "get_capabilities"):  # older releases of torch
        return False
    return bool(torch.cpu.get_capabilities().get("avx512_bf16"))


def _rate(step: int, full_rate_steps: int) -> float:
    return min(1.0, (step + 1) / _WARM_UP_STEPS, (full_rate_steps / (step + 1)) ** 0.5)


def _restore(
    path: Path, network: nn.Module, average: Average, optimizer: torch.optim.Optimizer
) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    network.load_state_dict(state["network"])
    for name, value in state["average"].items():
        average.weights[name].copy_(value)
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _save(
    path: Path, network: nn.Module, average: Average, optimizer: torch.optim.Optimizer, step: int
) -> None:
    state: dict[str, Any] = {"network": network.state_dict(), "average": average.weights}
    draft = path.with_suffix(".draft")
    torch.save({**state, "optimizer": optimizer.state_dict(), "step": step}, draft)
    draft.replace(path)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in values.items()}
