"""Golden tensors of the MOSS Audio Tokenizer: results of the package `moss-tts-lite` with random
weights at two small sizes.

The package contains its sizes in the code, which this program replaces. It is installed without its
dependencies, as for `golden_codecs.py`:

    python -m venv public && public/bin/pip install torch numpy safetensors
    public/bin/pip install --no-deps moss-tts-lite==1.1.0
    public/bin/python -m scripts.golden_moss tests/data/families
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch

from scripts.golden_codecs import Families, Golden, codes_of, write_families
from tests.support.moss_model import document, write_weights

_FRAMES = 10
_FRAMES_OF_FEWER = 4
_PUBLIC = "moss_tts_lite.codec"


def _transformer(inputs: int, outputs: int, width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "module_type": "Transformer",
        "input_dimension": inputs,
        "output_dimension": outputs,
        "d_model": width,
        "num_heads": heads,
        "num_layers": layers,
        "dim_feedforward": 2 * width,
        "causal": True,
        "norm": "layer_norm",
        "positional_embedding": "rope",
        "max_period": 10000,
        "gating": "none",
        "layer_scale": 0.01,
        "conv_layout": True,
    }


def _patches(size: int) -> dict[str, Any]:
    return {"module_type": "PatchedPretransform", "patch_size": size}


# The public code has 1,920 samples for each frame, and twice the rate after each transformer.
_SIZES = {
    "tiny": {
        "causal_transformer_context_duration": 0.4,
        "quantizer_kwargs": {
            "input_dim": 6,
            "rvq_dim": 10,
            "output_dim": 8,
            "num_quantizers": 4,
            "codebook_size": 16,
            "codebook_dim": 3,
        },
        "decoder_kwargs": [
            _transformer(8, 24, 16, 2, 2),
            _patches(2),
            _transformer(12, 960, 12, 1, 3),
            _patches(960),
        ],
    },
    "small": {
        "causal_transformer_context_duration": 0.25,
        "quantizer_kwargs": {
            "input_dim": 6,
            "rvq_dim": 8,
            "output_dim": 12,
            "num_quantizers": 3,
            "codebook_size": 32,
            "codebook_dim": 4,
        },
        "decoder_kwargs": [
            _transformer(12, 16, 8, 1, 1),
            _patches(2),
            _transformer(8, 20, 16, 2, 2),
            _patches(2),
            _transformer(10, 480, 8, 1, 2),
            _patches(480),
        ],
    },
}


def moss(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of codes, of all codebooks and of the first ones."""
    decoder = public_decoder(sizes)
    count = sizes["quantizer_kwargs"]["num_quantizers"]
    codes = codes_of(_FRAMES, count, sizes["quantizer_kwargs"]["codebook_size"])
    golden = {"codes": codes}
    for name, used, frames in (
        ("audio", count, _FRAMES),
        ("audio_of_fewer", count - 1, _FRAMES_OF_FEWER),
    ):
        decoder.quantizer.nq = used
        golden[name] = torch.from_numpy(decoder.decode_full(codes[:frames, :used]))
    return golden


def public_decoder(sizes: dict[str, Any]) -> Any:
    """Makes the public decoder with random weights."""
    from moss_tts_lite.codec import MossCodecDecoder  # type: ignore[import-not-found]

    parts = sizes["decoder_kwargs"]
    names = ("input_dimension", "output_dimension", "d_model", "num_layers", "num_heads")
    transformers = [tuple(part[name] for name in names) for part in parts[::2]]
    patches = [part["patch_size"] for part in parts[1::2]]
    with (
        TemporaryDirectory() as folder,
        mock.patch(f"{_PUBLIC}._DECODER_TRANSFORMERS", transformers),
        mock.patch(f"{_PUBLIC}._DECODER_PATCH_AFTER", patches),
    ):
        path = Path(folder)
        write_weights(path, document(sizes))
        return MossCodecDecoder(folder, device="cpu")


FAMILIES: Families = {"moss": (moss, _SIZES)}


if __name__ == "__main__":
    write_families(FAMILIES, __doc__)
