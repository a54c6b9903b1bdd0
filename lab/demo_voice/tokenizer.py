"""Speech tokenizer of the demo: a few convolutions over Whisper's log-mel, as an ONNX graph.

A token covers 40 ms. It has four digits of nine levels: outputs of the network between -4 and 4,
rounded (finite scalar quantisation, Mentzer et al., 2023). So there are 6561 tokens, as in
CosyVoice3. CosyVoice3 has eight digits of three levels; with a network of this size, they carry
less information.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from examples.demo_codec.codes import SLOPE, Unit
from lab.demo_voice.corpus import LISTENED_PER_TOKEN, Utterances
from token2wav_voice.features import TOKENIZER_BANDS

DIGITS, LEVELS = 4, 9
HIGHEST = LEVELS // 2  # a digit is one of -HIGHEST to HIGHEST
VOCABULARY = LEVELS**DIGITS
WIDTH = 192
_UNITS = 3
_CONTEXT = 2  # frames before and after the frames of a token, in the first convolution
_KERNEL = LISTENED_PER_TOKEN + 2 * _CONTEXT
_PLACES = LEVELS ** torch.arange(DIGITS)


class Tokenizer(nn.Module):
    """Tokenizer that turns the features of a recording into digits."""

    def __init__(self) -> None:
        super().__init__()
        self.listen = nn.Conv1d(TOKENIZER_BANDS, WIDTH, _KERNEL, stride=LISTENED_PER_TOKEN)
        self.units = nn.Sequential(*(Unit(WIDTH) for _ in range(_UNITS)))
        self.digits = nn.Conv1d(WIDTH, DIGITS, 1)

    def forward(self, heard: torch.Tensor) -> torch.Tensor:
        """Computes digits (B, 4, n) before rounding from features (B, 128, 4 * n).

        The input is padded with copies of its first and last frames.
        """
        padded = F.pad(heard, (_CONTEXT, _CONTEXT), mode="replicate")
        return HIGHEST * torch.tanh(
            self.digits(F.leaky_relu(self.units(self.listen(padded)), SLOPE))
        )

    @torch.no_grad()
    def tokens(self, corpus: Utterances) -> NDArray[np.int32]:
        """Computes the tokens of all recordings of a corpus, joined to one array (N,)."""
        heard = torch.from_numpy(corpus.heard).split((LISTENED_PER_TOKEN * corpus.tokens).tolist())
        tokens = [number(self(features.float().T[None])[0].round()) for features in heard]
        return torch.cat(tokens).numpy().astype(np.int32)

    def save(self, path: Path) -> None:
        """Writes the ONNX graph, with the inputs and outputs of the public tokenizer.

        Its weights are stored in float16.
        """
        graph = _Graph()
        x = graph.add("Slice", graph.input, graph.constant(0), graph.end, graph.constant(2))
        x = graph.add("Pad", x, graph.constant(0, 0, _CONTEXT, 0, 0, _CONTEXT), mode="edge")
        x = graph.convolution(x, self.listen, strides=[LISTENED_PER_TOKEN])
        for unit in self.units:
            assert isinstance(unit, Unit)
            near = graph.convolution(graph.activation(x), unit.near, pads=[1, 1])
            x = graph.add("Add", x, graph.convolution(graph.activation(near), unit.mix))
        x = graph.add("Tanh", graph.convolution(graph.activation(x), self.digits))
        highest = graph.tensor(np.full(1, HIGHEST, np.float32))
        digits = graph.add("Add", graph.add("Round", graph.add("Mul", x, highest)), highest)
        places = graph.tensor(_PLACES.numpy().astype(np.float32)[:, None])
        numbers = graph.add(
            "ReduceSum", graph.add("Mul", digits, places), graph.constant(1), keepdims=0
        )
        graph.write(path, tokens=graph.add("Cast", numbers, to=TensorProto.INT64))


def number(digits: torch.Tensor) -> torch.Tensor:
    """Combines rounded digits (4, n) into tokens (n,)."""
    return ((digits.long() + HIGHEST) * _PLACES[:, None]).sum(dim=0)


def all_digits() -> torch.Tensor:
    """Returns the digits of every token, (4, 6561)."""
    return ((torch.arange(VOCABULARY) // _PLACES[:, None]) % LEVELS - HIGHEST).float()


class _Graph:
    """Builder of an ONNX graph. Each node has the name of its output."""

    input, end = "feats", "end"

    def __init__(self) -> None:
        self._constants: list[onnx.TensorProto] = []
        self._nodes = [helper.make_node("Cast", ["feats_length"], [self.end], to=TensorProto.INT64)]

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        output = f"x{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, list(inputs), [output], **attributes))
        return output

    def tensor(self, value: NDArray[np.generic]) -> str:
        name = f"c{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(value, name))
        return name

    def constant(self, *values: int) -> str:
        return self.tensor(np.array(values))

    def activation(self, x: str) -> str:
        return self.add("LeakyRelu", x, alpha=SLOPE)

    def convolution(self, x: str, layer: nn.Conv1d, **attributes: Any) -> str:
        assert layer.bias is not None
        stored = (
            self.tensor(value.detach().half().numpy()) for value in (layer.weight, layer.bias)
        )
        weight, bias = (self.add("Cast", name, to=TensorProto.FLOAT) for name in stored)
        return self.add("Conv", x, weight, bias, **attributes)

    def write(self, path: Path, *, tokens: str) -> None:
        graph = helper.make_graph(
            self._nodes,
            "speech_tokenizer",
            [
                helper.make_tensor_value_info(
                    self.input, TensorProto.FLOAT, [1, TOKENIZER_BANDS, "T"]
                ),
                helper.make_tensor_value_info("feats_length", TensorProto.INT32, [1]),
            ],
            [helper.make_tensor_value_info(tokens, TensorProto.INT64, [1, "N"])],
            self._constants,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        onnx.checker.check_model(model)
        path.write_bytes(model.SerializeToString())
