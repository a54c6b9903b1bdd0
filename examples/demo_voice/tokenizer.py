"""The speech tokenizer: nearest of several thousand centres, learned by k-means, as an ONNX graph.

A token stands for 40 ms. It is chosen from four frames of Whisper's log-mel and, with less weight, two on either side.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tqdm import trange

from examples.demo_voice.corpus import LISTENED_PER_TOKEN, MEL_PER_TOKEN, Utterances
from token2wav_voice.features import TOKENIZER_BANDS

VOCABULARY = 4096
_CONTEXT = 2  # frames on either side
_CONTEXT_WEIGHT = 0.5
_KERNEL = LISTENED_PER_TOKEN + 2 * _CONTEXT
_DIMENSIONS = 64
_TOKENS_PER_CENTRE = 8  # at least, on average
_BLOCK = 8192


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Linear map of a token's neighbourhood, then the nearest centre.

    Attributes:
        kernel: (dimensions, 128, 8) a convolution with stride 4.
        centres: (vocabulary, dimensions).
    """

    kernel: torch.Tensor
    centres: torch.Tensor

    @classmethod
    def learn(cls, corpus: Utterances, rounds: int) -> Tokenizer:
        """k-means over all tokens of a corpus, in the space of their principal components."""
        generator = torch.Generator().manual_seed(0)
        patches = torch.cat([_patches(heard) for heard in _each(corpus)])  # (N, 128 * 8)
        weight = torch.full((_KERNEL,), _CONTEXT_WEIGHT)
        weight[_CONTEXT:-_CONTEXT] = 1.0
        weight = weight.repeat(TOKENIZER_BANDS)
        sample = patches[torch.randperm(len(patches), generator=generator)[:20_000]] * weight
        centred = sample - sample.mean(dim=0)
        _, axes = torch.linalg.eigh(centred.T @ centred)
        projection = weight[:, None] * axes[:, -_DIMENSIONS:]  # (128 * 8, dimensions)
        points = patches @ projection
        count = min(VOCABULARY, len(points) // _TOKENS_PER_CENTRE)
        centres = points[torch.randperm(len(points), generator=generator)[:count]].clone()
        for _ in trange(rounds, desc="tokenizer", unit="round"):
            nearest = _nearest(points, centres)
            sums = torch.zeros_like(centres).index_add_(0, nearest, points)
            members = torch.bincount(nearest, minlength=count)
            empty = members == 0
            centres = sums / members.clamp(min=1)[:, None]
            centres[empty] = points[torch.randperm(len(points), generator=generator)[: int(empty.sum())]]
        kernel = projection.T.reshape(_DIMENSIONS, TOKENIZER_BANDS, _KERNEL).contiguous()
        return cls(kernel.half().float(), centres.half().float())  # as they are stored

    def tokens(self, corpus: Utterances) -> NDArray[np.int32]:
        """Tokens of all recordings, one after the other."""
        flat = self.kernel.flatten(1).T
        found = [_nearest(_patches(heard) @ flat, self.centres) for heard in _each(corpus)]
        return torch.cat(found).numpy().astype(np.int32)

    def mean_mel(self, corpus: Utterances, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """What a token sounds like on average, (vocabulary, 80): where the flow's embedding may start."""
        mel = torch.from_numpy(corpus.mel.astype(np.float32)).unflatten(0, (-1, MEL_PER_TOKEN)).mean(dim=1)
        index = torch.from_numpy(tokens).long()
        sums = torch.zeros(len(self.centres), mel.shape[1]).index_add_(0, index, mel)
        return (sums / torch.bincount(index, minlength=len(self.centres)).clamp(min=1)[:, None]).numpy()

    def save(self, path: Path) -> None:
        """Writes the ONNX graph, with the interface of the public one."""
        offsets = self.centres.square().sum(dim=1) / 2
        constants = {
            "zero": np.array([0]),
            "time": np.array([2]),
            "margins": np.array([0, 0, _CONTEXT, 0, 0, _CONTEXT]),
            "kernel_half": self.kernel.half().numpy(),
            "centres_half": self.centres.T.half().numpy(),
            "offsets": offsets.numpy(),
        }
        nodes = [
            helper.make_node("Cast", ["kernel_half"], ["kernel"], to=TensorProto.FLOAT),
            helper.make_node("Cast", ["centres_half"], ["centres"], to=TensorProto.FLOAT),
            helper.make_node("Cast", ["feats_length"], ["end"], to=TensorProto.INT64),
            helper.make_node("Slice", ["feats", "zero", "end", "time"], ["heard"]),
            helper.make_node("Pad", ["heard", "margins"], ["padded"], mode="edge"),
            helper.make_node("Conv", ["padded", "kernel"], ["columns"], strides=[LISTENED_PER_TOKEN]),
            helper.make_node("Transpose", ["columns"], ["points"], perm=[0, 2, 1]),
            helper.make_node("MatMul", ["points", "centres"], ["products"]),
            helper.make_node("Sub", ["products", "offsets"], ["closeness"]),
            helper.make_node("ArgMax", ["closeness"], ["indices"], axis=2, keepdims=0),
        ]
        graph = helper.make_graph(
            nodes,
            "speech_tokenizer",
            [
                helper.make_tensor_value_info("feats", TensorProto.FLOAT, [1, TOKENIZER_BANDS, "T"]),
                helper.make_tensor_value_info("feats_length", TensorProto.INT32, [1]),
            ],
            [helper.make_tensor_value_info("indices", TensorProto.INT64, [1, "N"])],
            [numpy_helper.from_array(value, name) for name, value in constants.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        onnx.checker.check_model(model)
        path.write_bytes(model.SerializeToString())


def _each(corpus: Utterances) -> list[torch.Tensor]:
    """What the tokenizer hears of every recording, (4 * n, 128)."""
    heard = torch.from_numpy(corpus.heard)
    return list(heard.split((LISTENED_PER_TOKEN * corpus.tokens).tolist()))


def _patches(heard: torch.Tensor) -> torch.Tensor:
    """(4 * n, 128) frames to (n, 128 * 8) neighbourhoods; the edges go on with their last frame."""
    padded = F.pad(heard.float().T[None], (_CONTEXT, _CONTEXT), mode="replicate")[0]  # (128, frames)
    return padded.unfold(1, _KERNEL, LISTENED_PER_TOKEN).transpose(0, 1).flatten(1)


def _nearest(points: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """(N,) index of the centre that is nearest to each point."""
    offsets = centres.square().sum(dim=1) / 2
    return torch.cat([(block @ centres.T - offsets).argmax(dim=1) for block in points.split(_BLOCK)])
