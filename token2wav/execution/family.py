"""Interface of a family of models: its networks, their weights and their noise.

A family knows configurations, networks and weights. It knows no device, backend, CUDA graph or
cache size: `assemble.py` puts its networks on a device and makes the stages that run them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.execution.stages import Stage
from token2wav.execution.step import StepMaker
from token2wav.model_config import StageName
from token2wav.networks.noise import FlowNoise, SourceNoise
from token2wav.networks.ode import EulerSolver


@dataclass(frozen=True)
class ReferenceLoop:
    """Public loop of a family, which `stream.reference` repeats: every chunk is computed anew from
    the start.

    Attributes:
        full_tail: whether the last chunk is computed under full attention.
        windows: whether every chunk is computed under full attention, in a window of all tokens
            that are there.
        recomputes_audio: whether the vocoder starts anew for every chunk too, with the public
            rounding of its phase.
    """

    full_tail: bool = False
    windows: bool = False
    recomputes_audio: bool = False


class Family(ABC):
    """Family of models, whose folders are read alike.

    The networks of a flow decoder are a `Flow` with an `Estimator` for the stage `flow`, and a
    `VocoderNetwork` for the
    stage `vocoder`. A codec decoder has one stage, `decoder`: a `VocoderNetwork` whose bands are
    codes.

    Attributes:
        torch_only: name of the feature for which the networks run on torch alone; empty if they can
            be exported.
        reference: the public loop; None if it is not repeated.
    """

    torch_only: str = ""
    reference: ReferenceLoop | None = None

    @abstractmethod
    def network(self, config: Any, stage: StageName) -> nn.Module:
        """Makes the network of a stage without weights, on torch's default device."""

    @abstractmethod
    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        """Reads the weights of a stage's network from their file, which `ModelConfig.weights_file`
        names, in float32.

        Raises:
            CheckpointError: unreadable, or their names and shapes are not those of the network.
        """

    def noise(self, config: Any, folder: Path, stage: StageName) -> FlowNoise | SourceNoise | None:
        """Makes the noise of a stage's network; None if it has none.

        Raises:
            CheckpointError: the folder has noise of its own that cannot be used.
        """
        return None

    def kernel_step(self) -> StepMaker | None:
        """Returns the maker of the family's own step function on kernels; None to run its network
        on the shared one.
        """
        return None

    def own_stage(
        self,
        config: Any,
        stage: StageName,
        network: Any,
        noise: Any,
        solvers: Mapping[int, EulerSolver],
    ) -> Stage | None:
        """Makes a stage that only this family has, of a network on its device; None for the shared
        stage.

        Args:
            config: configuration of the model.
            stage: name of the stage.
            network: its network, on the device, with weights.
            noise: its noise.
            solvers: solvers of a flow's estimator, by number of ODE steps, the usual number first;
                else empty.
        """
        return None
