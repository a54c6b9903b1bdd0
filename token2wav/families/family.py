"""Interface of a family of models: its networks, their weights and their noise.

A family reads configurations, and makes networks with weights. `assembly.py` chooses device,
backend, CUDA graphs and cache size, puts the networks on the device, and makes their stages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.config.model_config import StageName
from token2wav.execution.cuda_graphs import GraphPool
from token2wav.execution.step import StepMaker
from token2wav.networks.noise import FlowNoise, SourceNoise
from token2wav.networks.ode import EulerSolver
from token2wav.stages.stage import Stage


@dataclass(frozen=True)
class ReferenceLoop:
    """Reference loop of a family: the way in which the public code computes chunks. The setting
    `stream.reference` repeats it. It recomputes every chunk from the start of the utterance.

    Attributes:
        full_tail: whether the last chunk is computed under full attention.
        windows: whether every chunk is computed under full attention over all tokens that have
            arrived, including the look-ahead of the chunk.
        recomputes_audio: whether the vocoder also computes every chunk from the start of the
            utterance, and rounds its phase as the public code does.
    """

    full_tail: bool = False
    windows: bool = False
    recomputes_audio: bool = False


@dataclass(frozen=True)
class StageParts:
    """Parts that a stage is made of.

    Attributes:
        solvers: solvers of the estimator of a flow, by number of ODE steps; the default number
            comes first. Empty for other stages.
    """

    config: Any
    name: StageName
    network: Any  # network of the stage, on the device, with weights
    noise: Any
    solvers: Mapping[int, EulerSolver]
    longest_hop: int  # tokens of the longest chunk
    graphs: GraphPool | None  # memory pool for CUDA graphs; None to run eagerly
    kernels: bool = False  # whether kernels of the Triton language run


class Family(ABC):
    """Family of models with one format of model folders.

    A flow decoder has two stages. The network of the stage `flow` is a `Flow` with an `Estimator`.
    The network of the stage `vocoder` is a `WaveformNetwork`. A codec decoder has one stage,
    `decoder`. The network is a `WaveformNetwork`, and its input bands are codes.

    Attributes:
        torch_only: name of the feature that no other backend than torch supports, for messages;
            empty if the networks can be exported.
        paged_flow: whether the flow runs in the shared stage, which stores its past in pages. False
            if `own_stage` makes a flow stage.
        reference: reference loop; None if the family has none.
    """

    torch_only: str = ""
    paged_flow: bool = True
    reference: ReferenceLoop | None = None

    @abstractmethod
    def network(self, config: Any, stage: StageName) -> nn.Module:
        """Makes the network of a stage without weights, on torch's default device."""

    @abstractmethod
    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        """Reads the weights of the network of a stage, in float32, from the file that
        `ModelConfig.weights_names` names.

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
        """Returns the class of the step function on kernels, which CUDA graphs capture; None to run
        the network eagerly on torch. It is called only where kernels can run.
        """
        return None

    def own_stage(self, parts: StageParts) -> Stage[Any] | None:
        """Makes a stage that only this family has. Returns None to use the shared stage."""
        return None
