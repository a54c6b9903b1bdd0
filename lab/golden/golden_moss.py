"""Golden tensors of the MOSS Audio Tokenizer with random weights at two small sizes: results of the
package `moss-tts-lite` for version 1, and of the published code of version 2, which the package
`vllm-omni` contains.

The first package has its sizes in the code, which this program replaces. Of the second package only
the published code is loaded. Both are installed without their dependencies, as for
`golden_codecs.py`:

    python -m venv public && public/bin/pip install torch numpy safetensors transformers
    public/bin/pip install --no-deps moss-tts-lite==1.1.0 vllm-omni==0.30.0
    public/bin/python -m lab.golden.golden_moss tests/data/families
"""

from __future__ import annotations

import importlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from lab.golden.golden_codecs import Families, Golden, codes_of, write_families
from lab.golden.public_packages import bare_package, package_folder
from testkit.models.codec_models import CODECS

_FRAMES = 10
_FRAMES_OF_FEWER = 4
_PUBLIC = "moss_tts_lite.codec"
_CHANNELS = 2  # of version 2


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
    """Computes the audio of all codebooks, and of the first ones."""
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
        CODECS["moss"].write(Path(folder), sizes)
        return MossCodecDecoder(folder, device="cpu")


# Version 2. Some transformers have as many channels inside as at their input or at their output,
# where version 1 has no projection. The small size begins with patches, as the codec of
# MOSS-TTS-Nano.
_STEREO_SIZES = {
    "tiny": {
        "sampling_rate": 2400,
        "downsample_rate": 192,
        "number_channels": _CHANNELS,
        "causal_transformer_context_duration": 0.4,
        "quantizer_kwargs": _SIZES["tiny"]["quantizer_kwargs"],
        "decoder_kwargs": [
            _transformer(8, 24, 16, 2, 2),
            _patches(2),
            _transformer(12, 192, 12, 1, 3),
            _patches(192),
        ],
    },
    "small": {
        "sampling_rate": 4800,
        "downsample_rate": 384,
        "number_channels": _CHANNELS,
        "causal_transformer_context_duration": 0.25,
        "quantizer_kwargs": _SIZES["small"]["quantizer_kwargs"],
        "decoder_kwargs": [
            _patches(2),
            _transformer(6, 16, 16, 1, 1),
            _patches(2),
            _transformer(8, 192, 16, 2, 2) | {"context_duration": 0.1},
            _patches(192),
        ],
    },
}


def moss_stereo(sizes: dict[str, Any]) -> Golden:
    """Computes the audio (samples, channels) of all codebooks, and of the first ones."""
    model = public_stereo(sizes)
    count = sizes["quantizer_kwargs"]["num_quantizers"]
    codes = codes_of(_FRAMES, count, sizes["quantizer_kwargs"]["codebook_size"])
    return {"codes": codes} | {
        name: model.decode(used.T).audio[0].T.contiguous()
        for name, used in (("audio", codes), ("audio_of_fewer", codes[:_FRAMES_OF_FEWER, :-1]))
    }


def public_stereo(sizes: dict[str, Any]) -> Any:
    """Makes the published model of version 2 with random weights in its decoder."""
    # The package of the file would load the whole server. So the file gets a package of its own.
    folder = package_folder("vllm_omni") / "model_executor" / "models" / "moss_tts"
    bare_package("public_moss", folder)
    public = importlib.import_module("public_moss.audio_tokenizer_v2")
    # The encoder is not used, but the rate of the decoder follows from its patches.
    content = CODECS["moss_stereo"].document(sizes)
    content["encoder_kwargs"] = [_patches(_CHANNELS * sizes["downsample_rate"])]
    model = public.MossAudioTokenizerModel(public.MossAudioTokenizerConfig(**content)).eval()
    with TemporaryDirectory() as written:
        folder = CODECS["moss_stereo"].write(Path(written), sizes)
        published = load_file(folder / "model.safetensors")
    # The file has other names for two layers than the published weights.
    weights = {
        name.replace("ffn.0", "linear1").replace("ffn.2", "linear2"): value
        for name, value in published.items()
    }
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert not [name for name in missing if name.startswith(("decoder", "quantizer"))], missing
    return model


FAMILIES: Families = {"moss": (moss, _SIZES), "moss_stereo": (moss_stereo, _STEREO_SIZES)}


if __name__ == "__main__":
    write_families(FAMILIES, __doc__)
