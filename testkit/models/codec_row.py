"""Row of the table of codecs: the files of one published format, and the names of its weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from testkit.models.published_weights import Naming, Rules, renamed
from testkit.models.random_weights import fill_state
from testkit.models.shards import write_pretrained
from token2wav.published.registry import read_config, unfilled_network

Document = dict[str, Any]
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Codec:
    """Row of the table.

    Attributes:
        names: names of the weights. They select the random values.
        document: content of the configuration file for the sizes of golden data.
        file, weights: files of the configuration and of the weights.
        further_files: contents of further JSON files by file name.
        fill: draws the values of the weights.
        renamed: rules for the names of the weights after their values are drawn.
        beside: tensors beside the weights of the network, by its sizes. Most are of other parts of
            the model, and are not read.
        wrapper: key of the weights in a pickle.
        shards: number of files of weights.
        packed: packs all files into an archive.
        golden: name of the golden data; empty if it is the name of the row.
        windows: whether the decoder is not causal. `test_window_contract.py` tests its windows, and
            `test_codec_contract.py` its whole utterances.
        sizes: sizes of the golden data.
    """

    names: Naming
    document: Callable[[Document], Document] = dict
    file: str = "config.json"
    weights: str = "model.safetensors"
    further_files: Mapping[str, Document] = field(default_factory=dict)
    fill: Callable[[Weights], Weights] = fill_state
    renamed: Rules = ()
    beside: Callable[[Any], Weights] = lambda sizes: {}
    wrapper: str = ""
    shards: int = 1
    packed: Callable[[Path], object] = lambda folder: None
    golden: str = ""
    windows: bool = False
    sizes: tuple[str, ...] = ("tiny", "small")

    def write(self, folder: Path, sizes: Document) -> Path:
        """Writes a model folder, and returns the folder."""
        self.write_document(folder, sizes)
        weights = self.published_weights(folder)
        if self.shards > 1:
            (folder / self.weights).unlink()
            named = list(weights.items())
            write_pretrained(
                folder,
                self.document(sizes),
                *(dict(named[start :: self.shards]) for start in range(self.shards)),
            )
        elif self.weights.endswith(".safetensors"):
            save_file(weights, folder / self.weights)
        else:
            torch.save({self.wrapper: weights} if self.wrapper else weights, folder / self.weights)
        self.packed(folder)
        return folder

    def write_document(self, folder: Path, sizes: Document) -> Path:
        """Writes a model folder without weights, and returns the folder."""
        for name, document in {self.file: self.document(sizes), **self.further_files}.items():
            dump = yaml.safe_dump if name.endswith(".yaml") else json.dumps
            (folder / name).write_text(dump(document))
        (folder / self.weights).touch()
        return folder

    def published_weights(self, folder: Path) -> Weights:
        """Returns the weights for the configuration of a folder."""
        config: Any = read_config(folder)
        weights = self.fill(self.names.weights(unfilled_network(config, "decoder"), config.sizes))
        named = {renamed(name, self.renamed): value for name, value in weights.items()}
        return named | self.beside(config.sizes)


class Descript(Codec):
    """Codec in the format of `descript-audio-codec`, which has the sizes in the file of weights."""

    def write(self, folder: Path, sizes: Document) -> Path:
        content: dict[str, Any] = {"metadata": {"kwargs": {**sizes, "quantizer_dropout": 0.5}}}
        torch.save(content, folder / self.weights)
        content["state_dict"] = self.published_weights(folder)
        torch.save(content, folder / self.weights)
        return folder


def pointwise(shape: tuple[int, ...], sizes: Any) -> tuple[int, ...]:
    """Returns the shape of a product that is published as a convolution with a kernel of one."""
    return (*shape, 1)


def slopes(shape: tuple[int, ...], sizes: Any) -> tuple[int, ...]:
    """Returns the published shape of the slopes of an activation."""
    return (1, *shape, 1)


def unread(*names: str) -> Callable[[Any], Weights]:
    """Returns a value for `Codec.beside`: tensors that no reader reads."""
    return lambda sizes: {name: torch.ones(3) for name in names}
