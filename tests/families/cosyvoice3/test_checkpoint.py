"""Model folders: every form of a good one gives the same modules, every bad one a sentence, and
nothing is executed.
"""

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
from safetensors.torch import load_file, save_file
from torch import nn

from testkit.models.shards import divide
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
from token2wav import CheckpointError, RuntimeConfig, Token2Wav, Token2WavError
from token2wav.assembly import check_folder, load_network
from token2wav.config.model_config import StageName
from token2wav.families.cosyvoice3.config import CosyVoice3Config
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.families.cosyvoice3.noise import load_flow_noise, load_source_noise
from token2wav.networks.hift import HiFT


@pytest.fixture(scope="module")
def config() -> CosyVoice3Config:
    return CosyVoice3Config.read(TINY)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_copy(tmp_path)


@pytest.fixture
def small(folder: Path) -> Path:
    """A model with fewer residual blocks, to be broken: most of the time of a load goes into
    building them.
    """
    path = folder / "cosyvoice3.yaml"
    text = path.read_text(encoding="utf-8").replace(
        "[[1, 3, 5], [1, 3, 5], [1, 3, 5]]", "[[1], [1], [1]]"
    )
    text = text.replace("    resblock_kernel_sizes: [3, 7, 11]", "    resblock_kernel_sizes: [3]")
    path.write_text(
        text.replace(" resblock_dilation_sizes: [[1], [1], [1]]", " resblock_dilation_sizes: [[1]]")
    )
    save_file(HiFT(CosyVoice3Config.read(folder).vocoder).state_dict(), folder / "hift.safetensors")
    return folder


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


def with_old_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    def old(name: str) -> str:
        name = name.replace("parametrizations.weight.original0", "weight_g")
        return name.replace("parametrizations.weight.original1", "weight_v")

    return {old(name): value for name, value in weights.items()}


def with_prefix(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"generator.{name}": value for name, value in weights.items()}


OLD = ".pt of old versions of torch"
Forms = dict[str, Callable[[dict[str, torch.Tensor]], dict[str, Any]]]
FORMS: Forms = {
    "published": dict,
    "old names": with_old_names,
    "prefix": with_prefix,
    "both": lambda weights: with_prefix(with_old_names(weights)),
    "other order": lambda weights: dict(reversed(weights.items())),
    "with bookkeeping": lambda weights: OrderedDict(weights, epoch=12, step=120000),
}


@pytest.mark.parametrize(
    ("stem", "suffix", "form"),
    [
        *(("flow", ".pt", form) for form in ("published", "other order", "with bookkeeping")),
        *(("hift", ".pt", form) for form in ("published", "old names", "prefix", "both")),
        *(("hift", ".safetensors", form) for form in ("published", "old names", "prefix", "both")),
        ("hift", OLD, "published"),
    ],
)
def test_every_form_of_the_weights_gives_the_same_module(
    folder: Path,
    reference: dict[str, dict[str, torch.Tensor]],
    stem: str,
    suffix: str,
    form: str,
) -> None:
    weights = FORMS[form](tiny_weights(stem))
    if suffix == OLD:
        (folder / f"{stem}.safetensors").unlink()
        torch.save(weights, folder / f"{stem}.pt", _use_new_zipfile_serialization=False)
    else:
        replace_weights(folder, stem, weights, suffix)
    assert_same(loaded(folder, stem), reference[stem])


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("stem", STEMS)
def test_shards_give_the_same_module(
    folder: Path, reference: dict[str, dict[str, torch.Tensor]], stem: str, index: bool
) -> None:
    divide(folder / f"{stem}.safetensors", index=index)
    assert_same(loaded(folder, stem), reference[stem])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
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


def test_safetensors_are_preferred_when_both_formats_are_there(
    folder: Path, reference: dict[str, dict[str, torch.Tensor]]
) -> None:
    torch.save(
        {name: torch.zeros_like(value) for name, value in tiny_weights("flow").items()},
        folder / "flow.pt",
    )
    assert_same(loaded(folder, "flow"), reference["flow"])


# Faults of a model folder. The check and the load report every fault.

Breakage = Callable[[Path], None]
BIAS = "spk_embed_affine_layer.bias"
MATRIX = "spk_embed_affine_layer.weight"
GAIN = "conv_pre.parametrizations.weight.original0"


def changed(stem: str, suffix: str = ".pt", /, **tensors: Any) -> Breakage:
    """Replaces tensors of a stage; None removes one."""

    def break_it(folder: Path) -> None:
        weights = {**load_file(folder / f"{stem}.safetensors"), **tensors}
        weights = {name: value for name, value in weights.items() if value is not None}
        replace_weights(folder, stem, weights, suffix)

    return break_it


def rearranged(stem: str, change: Callable[[dict[str, Any]], object]) -> Breakage:
    """Writes another object than the dictionary of tensors."""

    def break_it(folder: Path) -> None:
        weights = load_file(folder / f"{stem}.safetensors")
        replace_weights(folder, stem, change(weights), ".pt")

    return break_it


def truncated(name: str, keep: float) -> Breakage:
    def break_it(folder: Path) -> None:
        stem, suffix = name.split(".")
        weights = load_file(folder / f"{stem}.safetensors")
        path = replace_weights(folder, stem, weights, f".{suffix}")
        path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])

    return break_it


def written(name: str, content: bytes) -> Breakage:
    def break_it(folder: Path) -> None:
        for old in folder.glob(f"{name.partition('.')[0]}.*"):
            old.unlink()
        (folder / name).write_bytes(content)

    return break_it


def removed(*names: str) -> Breakage:
    def break_it(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return break_it


def noise(**tensors: torch.Tensor) -> Breakage:
    return lambda folder: save_file(tensors, folder / "noise.safetensors")


SWAPPED = rearranged("flow", lambda weights: tiny_weights("hift"))
LFS = b"version https://git-lfs.github.com/spec/v1\n"
RAND_NOISE, SINES = "cfm.rand_noise", "sinegen.sine_waves"
TRANSPOSED = {MATRIX: torch.ones(192, 80)}
INFINITE = {GAIN: torch.full((32, 1, 1), float("inf"))}
HUGE = {BIAS: torch.full((80,), 1e300, dtype=torch.float64)}
NAN_NOISE = {RAND_NOISE: torch.full((1, 80, 4), float("nan"))}

BREAKAGES: list[tuple[Breakage, list[str]]] = [
    (changed("flow", **{BIAS: None}), ["flow.pt", "1 missing", BIAS]),
    (changed("flow", ".safetensors", **{BIAS: None}), ["1 missing", BIAS]),
    (changed("hift", **{"ups.9.bias": torch.ones(2)}), ["1 unexpected", "ups.9.bias"]),
    (changed("flow", **{BIAS: torch.ones(81)}), [BIAS, "(81,)", "(80,)"]),
    (changed("flow", **TRANSPOSED), [MATRIX, "(192, 80)", "(80, 192)"]),
    (changed("flow", **{BIAS: torch.full((80,), float("nan"))}), ["NaN", BIAS]),
    (changed("hift", ".safetensors", **INFINITE), ["infinite", GAIN]),
    (changed("flow", **HUGE), ["infinite", BIAS]),
    (changed("flow", **{BIAS: torch.ones(80).long()}), [BIAS, "int64", "floating"]),
    (changed("flow", ".safetensors", **{BIAS: torch.ones(80).char()}), [BIAS, "int8"]),
    (changed("flow", **{BIAS: torch.ones(80) + 0j}), [BIAS, "complex64"]),
    (changed("flow", extra=[1, 2]), ["'extra'", "list"]),
    (changed("hift", **{"conv_pre.weight_g": torch.ones(32, 1, 1)}), ["twice", GAIN]),
    (rearranged("flow", lambda w: {"state_dict": w}), ["'state_dict'", "dict", "not a tensor"]),
    (rearranged("flow", lambda w: list(w.values())), ["flow.pt", "state dict", "list"]),
    (rearranged("hift", lambda w: torch.ones(3)), ["state dict", "Tensor"]),
    (rearranged("flow", lambda w: {}), ["missing", "input_embedding.weight"]),
    (SWAPPED, ["flow.pt", "missing", "unexpected"]),
    (truncated("flow.pt", 0.9), ["flow.pt", "cannot be read"]),
    (truncated("hift.pt", 0.01), ["hift.pt"]),
    (truncated("flow.safetensors", 0.9), ["flow.safetensors", "cannot be read"]),
    (truncated("hift.safetensors", 0.01), ["hift.safetensors", "cannot be read"]),
    (written("flow.pt", b""), ["flow.pt: the file is empty; download it again"]),
    (written("flow.safetensors", b""), ["flow.safetensors: the file is empty"]),
    (written("flow.pt", LFS), ["flow.pt", "a pointer of Git LFS"]),
    (written("hift.safetensors", LFS), ["hift.safetensors", "a pointer of Git LFS"]),
    (written("flow.safetensors", b"\xff" * 64), ["flow.safetensors"]),
    (removed("hift.safetensors"), ["hift.safetensors", "hift.pt"]),
    (removed("flow.safetensors"), ["flow.safetensors", "flow.pt"]),
    (removed("flow.safetensors", "hift.safetensors"), ["contains none of"]),
    (removed("cosyvoice3.yaml"), ["cosyvoice3.yaml", "not a model folder"]),
    (noise(**{RAND_NOISE: torch.zeros(1, 40, 50)}), [RAND_NOISE, "(1, 40, 50)", "80"]),
    (noise(**{RAND_NOISE: torch.zeros(80, 50)}), [RAND_NOISE, "(80, 50)"]),
    (noise(**NAN_NOISE), [RAND_NOISE, "NaN"]),
    (noise(**{SINES: torch.zeros(1, 480, 8)}), [SINES, "(1, 480, 8)", "9"]),
    (noise(**{SINES: torch.zeros(1, 480, 9).double()}), [SINES, "float64", "float32"]),
    (written("noise.safetensors", b""), ["noise.safetensors: the file is empty"]),
    (written("noise.safetensors", b"not tensors"), ["noise.safetensors", "cannot be read"]),
]


@pytest.mark.parametrize(("break_it", "words"), BREAKAGES)
def test_a_broken_folder_is_refused_with_one_sentence(
    small: Path, break_it: Breakage, words: list[str]
) -> None:
    break_it(small)
    with pytest.raises(Token2WavError) as checked:
        check_folder(small)
    with pytest.raises(Token2WavError) as load:
        Token2Wav.load(small, runtime=RuntimeConfig(device="cpu"))
    message = one_line(load.value)
    assert one_line(checked.value) == message
    assert str(small) in message
    for word in words:
        assert word in message


def test_a_good_folder_passes_the_check(folder: Path, small: Path) -> None:
    check_folder(folder)
    check_folder(small)
    check_folder(TINY)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    for read in (check_folder, Token2Wav.load):
        with pytest.raises(Token2WavError, match="no such model folder"):
            read(tmp_path / "nowhere")


def test_everything_that_does_not_fit_is_listed_in_one_error(folder: Path) -> None:
    weights = tiny_weights("flow")
    del weights["input_embedding.weight"]
    weights["decoder.estimator.proj_out.bias"] = torch.ones(79)
    weights["decoder.estimator.extra.weight"] = torch.ones(1)
    replace_weights(folder, "flow", weights)
    with pytest.raises(CheckpointError) as caught:
        check_folder(folder)
    message = one_line(caught.value)
    assert "1 missing: input_embedding.weight" in message
    assert "1 unexpected: decoder.estimator.extra.weight" in message
    assert "1 wrongly shaped: decoder.estimator.proj_out.bias (79,) instead of (80,)" in message


def test_a_long_list_of_misfits_is_counted_and_cut(folder: Path) -> None:
    replace_weights(folder, "flow", {"one": torch.ones(1)})
    with pytest.raises(CheckpointError) as caught:
        check_folder(folder)
    message = one_line(caught.value)
    count = len(tiny_weights("flow"))
    assert f"{count} missing" in message
    assert f"and {count - 8} more" in message


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
    small: Path, tmp_path: Path, trap: type[TouchesFile], stem: str, form: str
) -> None:
    bait = tmp_path / "executed"
    weights: dict[str, Any] = {**tiny_weights(stem), "epoch": trap(bait)}
    path = small / f"{stem}.pt"
    (small / f"{stem}.safetensors").unlink()
    if form == "pickle":
        path.write_bytes(pickle.dumps(weights))
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=form == "torch")
    for read in (check_folder, Token2Wav.load):
        with pytest.raises(CheckpointError) as caught:
            read(small)
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
    folder: Path, config: CosyVoice3Config
) -> None:
    frames, samples = 420, 4800
    generator = torch.Generator().manual_seed(1)  # the public code seeds with 0
    tables = {
        RAND_NOISE: torch.randn(1, 80, frames, generator=generator),
        SINES: torch.rand(1, samples, 9, generator=generator),
    }
    stock_flow, stock_source = load_flow_noise(folder, config), load_source_noise(folder, config)
    noise(**tables)(folder)
    flow, source = load_flow_noise(folder, config), load_source_noise(folder, config)
    assert torch.equal(flow.window(0, frames), tables[RAND_NOISE][0])
    assert torch.equal(source.window(0, samples), tables[SINES][0])
    assert torch.equal(flow.window(frames, frames + 100), stock_flow.window(frames, frames + 100))
    assert torch.equal(
        source.window(samples, samples + 100), stock_source.window(samples, samples + 100)
    )
