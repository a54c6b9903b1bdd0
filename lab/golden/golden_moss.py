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
    patch = sizes["number_channels"] * sizes["downsample_rate"]
    content["encoder_kwargs"] = [{"module_type": "PatchedPretransform", "patch_size": patch}]
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


FAMILIES: Families = {"moss": moss, "moss_stereo": moss_stereo}


if __name__ == "__main__":
    write_families(FAMILIES, __doc__)
