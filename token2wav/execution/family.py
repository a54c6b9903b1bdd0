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
    """Public loop of a family, which `stream.reference` repeats. It recomputes every chunk from the
    start.

    Attributes:
        full_tail: whether the last chunk is computed under full attention.
        windows: whether every chunk is computed under full attention, in a window of all available
            tokens.
        recomputes_audio: whether the vocoder also starts anew for every chunk, with the public
            rounding of its phase.
    """

    full_tail: bool = False
    windows: bool = False
    recomputes_audio: bool = False


class Family(ABC):
    """Family of models with one format of model folders.

    A flow decoder has two stages. The network of the stage `flow` is a `Flow` with an `Estimator`.
    The network of the stage `vocoder` is a `VocoderNetwork`. A codec decoder has one stage,
    `decoder`. Its network is a `VocoderNetwork` whose input bands are codes.

    Attributes:
        torch_only: name of the feature that restricts the networks to torch; empty if they can be
            exported.
        reference: public loop; None if the family does not repeat one.
    """

    torch_only: str = ""
    reference: ReferenceLoop | None = None

    @abstractmethod
    def network(self, config: Any, stage: StageName) -> nn.Module:
        """Makes the network of a stage without weights, on torch's default device."""

    @abstractmethod
    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        """Reads the weights of the network of a stage, in float32, from the file that
        `ModelConfig.weights_file` names.

        Raises:
            CheckpointError: the file is unreadable, or names and shapes differ from the network.
        """

    def noise(self, config: Any, folder: Path, stage: StageName) -> FlowNoise | SourceNoise | None:
        """Makes the noise of the network of a stage; None for a network without noise.

        Raises:
            CheckpointError: the folder has noise of its own that cannot be used.
        """
        return None

    def kernel_step(self) -> StepMaker | None:
        """Returns the maker of a step function on kernels of this family; None to run the network
        on the shared step function.
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
        """Makes a stage that only this family has; None for the shared stage.

        Args:
            config: configuration of the model.
            stage: name of the stage.
            network: network of the stage, on the device, with weights.
            noise: noise of the network.
            solvers: solvers of the estimator of a flow, by number of ODE steps, the usual number
                first; empty for other stages.
        """
        return None
