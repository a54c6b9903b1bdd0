"""TF32 is off for a model on a GPU, and nobody's setting is touched for one on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.unit.material import TINY
from token2wav import RuntimeConfig, StreamConfig
from token2wav.engines import build
from token2wav.engines.choice import Host
from token2wav.engines.exact_convolutions import keep_convolutions_exact
from token2wav.model_config import ModelConfig


@pytest.fixture(autouse=True)
def _as_torch_starts() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize(("device", "left"), [("cuda", False), ("cuda:1", False), ("cpu", True)])
def test_on_a_gpu_only(device: str, left: bool) -> None:
    keep_convolutions_exact(torch.device(device))
    assert torch.backends.cudnn.allow_tf32 is left


def test_before_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that graphs, which are recorded while a model loads, have no TF32 in them."""

    def load(*_: object) -> None:
        assert not torch.backends.cudnn.allow_tf32
        raise InterruptedError

    monkeypatch.setattr(build, "load_flow", load)
    host = Host(TINY, RuntimeConfig(engine="torch"), torch.device("cuda"))
    with pytest.raises(InterruptedError):
        build.build_engines(host, ModelConfig.read(TINY), StreamConfig())
