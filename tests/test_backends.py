"""Choice of a backend for a GPU. The devices are only named, so no test needs one."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from testkit.models.golden import TINY
from token2wav import RuntimeConfig
from token2wav.backends import LoadContext, choose, kernels_run
from token2wav.config.settings import DecoderPrecision
from token2wav.errors import ConfigError


def test_float8_needs_a_gpu_that_converts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, capability = RuntimeConfig(cache_storage="float8"), (8, 6)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ConfigError, match=r"float8 needs .* 8\.9 or more, but cuda has 8\.6"):
        choose(LoadContext(TINY, runtime, torch.device("cuda")), ("flow", "vocoder"))
    choose(LoadContext(TINY, runtime, torch.device("cpu")), ("flow", "vocoder"))
    capability = (8, 9)
    choose(LoadContext(TINY, runtime, torch.device("cuda")), ("flow", "vocoder"))


@pytest.mark.parametrize("precision", ["float16x3", "float16"])
def test_a_decoder_precision_needs_a_torch_that_has_it(
    precision: DecoderPrecision, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = RuntimeConfig(decoder_precision=precision)
    gpu, cpu = (LoadContext(TINY, runtime, torch.device(name)) for name in ("cuda", "cpu"))
    choose(gpu, ("decoder",))
    monkeypatch.setattr(torch.ops.aten.mm, "overloads", lambda: ["default", "out"])
    with pytest.raises(ConfigError, match=rf"{precision} needs torch 2\.8 or later on a GPU"):
        choose(gpu, ("decoder",))
    choose(gpu, ("flow", "vocoder"))  # of codecs only
    choose(cpu, ("decoder",))


@pytest.mark.parametrize(
    ("capability", "dim_head", "release", "compiler", "run"),
    [
        ((9, 0), 64, "3.5.0", True, True),
        ((9, 0), 64, "3.10.0+git1a2b", True, True),
        ((7, 5), 64, "3.5.0", True, False),
        ((9, 0), 48, "3.5.0", True, False),
        ((9, 0), 64, "3.4.1", True, False),
        ((9, 0), 64, "3.5.0", False, False),
    ],
)
def test_kernels_run_where_gpu_and_model_allow(
    capability: tuple[int, int],
    dim_head: int,
    release: str,
    compiler: bool,
    run: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = pytest.importorskip("triton.runtime").driver
    monkeypatch.setattr("triton.__version__", release)

    def compiled() -> object:
        if not compiler:
            raise RuntimeError("Failed to find C compiler")
        return SimpleNamespace(get_current_device=lambda: 0)

    monkeypatch.setattr(driver, "_active", None)
    monkeypatch.setattr(driver, "_default", None)
    monkeypatch.setattr(sys.modules[type(driver).__module__], "_create_driver", compiled)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert kernels_run(torch.device("cpu"), dim_head) == run
    assert ("Failed to find C compiler" in caplog.text) == (not compiler)
    assert ("or later, but this is 3.4.1" in caplog.text) == (release == "3.4.1")
