"""Model folders: every form of a good one gives the same modules, and nothing is executed."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from testkit.models.few_convolutions import a_tiny_model
from testkit.models.tiny_model import (
    DATA,
    FULL_SIZE,
    STEMS,
    TINY,
    one_line,
    replace_weights,
    tiny_copy,
    tiny_weights,
)
from testkit.patience import PATIENCE_SECONDS
from token2wav import CheckpointError, Token2Wav
from token2wav.assembly import check_folder, load_network
from token2wav.config.model_config import StageName
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.families.cosyvoice3.noise import load_flow_noise, load_source_noise
from token2wav.networks.hift import HiFT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_copy(tmp_path)


STAGES: dict[str, StageName] = {"flow": "flow", "hift": "vocoder"}  # by the stems of their files


@pytest.fixture(scope="module")
def reference() -> dict[str, dict[str, torch.Tensor]]:
    config = CosyVoice3Config.read(TINY)
    return {stem: load_network(TINY, config, stage).state_dict() for stem, stage in STAGES.items()}


def loaded(folder: Path, stem: str) -> dict[str, torch.Tensor]:
    config = CosyVoice3Config.read(folder)
    module: nn.Module = load_network(folder, config, STAGES[stem])
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    return module.state_dict()


def assert_same(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(weights) == list(expected)
    for name, value in expected.items():
        assert weights[name].dtype == value.dtype, name
        assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("stem", STEMS)
def test_full_size_modules_match_public_checkpoints(stem: str) -> None:
    config = CosyVoice3Config.read(FULL_SIZE)
    with torch.device("meta"):
        module: nn.Module = Flow(config.flow) if stem == "flow" else HiFT(config.vocoder)
    shapes = {
        name: [list(value.shape), str(value.dtype)] for name, value in module.state_dict().items()
    }
    assert shapes == json.loads((DATA / "public_state_dict_shapes.json").read_text())[stem]


def test_a_load_imports_no_compiler() -> None:
    code = (
        "import sys, token2wav; token2wav.Token2Wav.load(sys.argv[1]); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, TINY], check=True, timeout=PATIENCE_SECONDS)


# Every form in which the same weights are found in the wild.


def as_in_training(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns weights with the prefix of a GAN's training, and the older names of weight norm."""

    def older(name: str) -> str:
        name = name.replace("parametrizations.weight.original0", "weight_g")
        return name.replace("parametrizations.weight.original1", "weight_v")

    return {f"generator.{older(name)}": value for name, value in weights.items()}


OLD = ".pt of old versions of torch"
FORMS: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, Any]]] = {
    "published": dict,
    "training": as_in_training,
    "with bookkeeping": lambda weights: OrderedDict(weights, epoch=12, step=120000),
}


@pytest.mark.parametrize(
    ("stem", "suffix", "form"),
    [
        ("flow", ".pt", "with bookkeeping"),
        ("hift", ".pt", "training"),
        ("hift", ".safetensors", "training"),
        ("hift", OLD, "published"),
    ],
)
def test_every_form_of_the_weights_gives_the_same_module(
    folder: Path, reference: dict[str, dict[str, torch.Tensor]], stem: str, suffix: str, form: str
) -> None:
    weights = FORMS[form](tiny_weights(stem))
    if suffix == OLD:
        (folder / f"{stem}.safetensors").unlink()
        torch.save(weights, folder / f"{stem}.pt", _use_new_zipfile_serialization=False)
    else:
        replace_weights(folder, stem, weights, suffix)
    assert_same(loaded(folder, stem), reference[stem])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_other_precisions_are_widened_to_float32(
    folder: Path, dtype: torch.dtype, suffix: str
) -> None:
    weights = {name: value.to(dtype) for name, value in tiny_weights("flow").items()}
    replace_weights(folder, "flow", weights, suffix)
    tensors = loaded(folder, "flow")
    for name, value in weights.items():
        assert tensors[name].dtype == torch.float32, name
        assert torch.equal(tensors[name], value.float()), name


RAND_NOISE, SINES = "cfm.rand_noise", "sinegen.sine_waves"


# Nothing in a checkpoint is executed.


class TouchesFile:
    """Creates a file when a loader that executes code unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.open, (str(self.path), os.O_CREAT | os.O_WRONLY)


class RunsCommand(TouchesFile):
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.path}'",)


@pytest.mark.parametrize("trap", [TouchesFile, RunsCommand])
@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("form", ["torch", "torch legacy", "pickle"])
def test_code_in_a_checkpoint_is_refused_and_not_executed(
    tmp_path: Path, trap: type[TouchesFile], stem: str, form: str
) -> None:
    bait = tmp_path / "executed"
    weights: dict[str, Any] = {**tiny_weights(stem), "epoch": trap(bait)}
    folder = a_tiny_model(tmp_path)
    path = folder / f"{stem}.pt"
    path.with_suffix(".safetensors").unlink(missing_ok=True)
    if form == "pickle":
        path.write_bytes(pickle.dumps(weights))
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=form == "torch")
    for read in (check_folder, Token2Wav.load):
        with pytest.raises(CheckpointError) as caught:
            read(folder)
        message = one_line(caught.value)
        assert "nothing was executed" in message
        # the module where os.open and os.system live
        assert form == "pickle" or f"'{os.name}." in message
    assert not bait.exists()


def test_the_trap_of_the_test_above_works(tmp_path: Path) -> None:
    for trap in (TouchesFile, RunsCommand):
        bait = tmp_path / trap.__name__
        result = pickle.loads(pickle.dumps(trap(bait)))
        assert bait.exists()
        if trap is TouchesFile:
            os.close(result)


def test_damaged_checkpoints_raise_only_checkpoint_errors(folder: Path) -> None:
    weights = {"a.weight": torch.ones(2, 2), "b.bias": torch.ones(3)}
    safetensors, legacy = replace_weights(folder, "flow", weights), folder / "legacy.pt"
    torch.save(weights, legacy, _use_new_zipfile_serialization=False)
    originals = [(".safetensors", safetensors.read_bytes()), (".pt", legacy.read_bytes())]
    safetensors.unlink()
    config = CosyVoice3Config.read(folder)
    generator = torch.Generator().manual_seed(0)
    for suffix, original in originals:
        path = folder / f"flow{suffix}"
        for _ in range(60):
            damaged = bytearray(original)
            for at in torch.randint(len(damaged), (4,), generator=generator).tolist():
                damaged[at] = int(torch.randint(256, (1,), generator=generator))
            path.write_bytes(damaged)
            # even an undamaged one has the wrong names
            with pytest.raises(CheckpointError) as caught:
                load_network(folder, config, "flow")
            one_line(caught.value)
        path.unlink()


def test_noise_of_the_folder_replaces_the_first_samples(
    folder: Path,
) -> None:
    config, frames, samples = CosyVoice3Config.read(TINY), 420, 4800
    generator = torch.Generator().manual_seed(1)  # the public code seeds with 0
    tables = {
        RAND_NOISE: torch.randn(1, 80, frames, generator=generator),
        SINES: torch.rand(1, samples, 9, generator=generator),
    }
    stock_flow, stock_source = load_flow_noise(folder, config), load_source_noise(folder, config)
    save_file(tables, folder / "noise.safetensors")
    flow, source = load_flow_noise(folder, config), load_source_noise(folder, config)
    assert torch.equal(flow.window(0, frames), tables[RAND_NOISE][0])
    assert torch.equal(source.window(0, samples), tables[SINES][0])
    assert torch.equal(flow.window(frames, frames + 100), stock_flow.window(frames, frames + 100))
    assert torch.equal(
        source.window(samples, samples + 100), stock_source.window(samples, samples + 100)
    )
