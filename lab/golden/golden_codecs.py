"""Golden tensors of codec decoders: results of their public code with random weights at two small
sizes.

The packages ask for much that decoding never uses. So they are installed without their
dependencies, in an environment of their own. Tests read the files of this program and need none of
the packages:

    python -m venv public && public/bin/pip install torch numpy einops safetensors transformers
    public/bin/pip install --no-deps nemo-toolkit==3.0.0 qwen-tts-compat==0.1.1.post1 moshi==0.2.13
    public/bin/python -m lab.golden.golden_codecs tests/data/families
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save_file

from lab.golden.public_packages import (
    EmptyModule,
    bare_package,
    module_of,
    package_folder,
    refilled,
)
from testkit.models.random_weights import SEED, fill, fill_qwen3, fill_state

Golden = dict[str, torch.Tensor]
Families = dict[str, Callable[[dict[str, Any]], Golden]]
# Sizes of the networks by family, `tiny` and `small`.
SIZES: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(
    Path(__file__).with_name("sizes.yaml").read_text()
)
_FRAMES = 12  # frames of the codes


def codes_of(frames: int, codebooks: int, size: int) -> torch.Tensor:
    """Draws codes (frames, codebooks)."""
    codes = np.random.default_rng([SEED, 7]).integers(0, size, (frames, codebooks))
    return torch.from_numpy(codes)


def of_all_and_fewer(codes: torch.Tensor, decode: Callable[[torch.Tensor], torch.Tensor]) -> Golden:
    """Computes the audio of all codebooks, and of all but the last one.

    Args:
        codes: (frames, codebooks).
        decode: computes the audio of codes (1, codebooks, frames).
    """
    audio, of_fewer = (decode(used.T[None]) for used in (codes, codes[:, :-1]))
    return {"codes": codes, "audio": audio, "audio_of_fewer": of_fewer}


# NanoCodec.


def nanocodec(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of codes, by NeMo's decoder and quantiser."""
    quantizer, decoder = nemo_modules(sizes)
    size = int(np.prod(sizes["vector_quantizer"]["num_levels_per_group"]))
    codes = codes_of(_FRAMES, sizes["vector_quantizer"]["num_groups"], size)
    length = torch.tensor([_FRAMES])
    values = quantizer.decode(indices=codes.T[:, None], input_len=length)
    audio, _ = decoder(inputs=values, input_len=length)
    return {"codes": codes, "values": values[0], "audio": audio[0]}


def nemo_modules(sizes: dict[str, Any]) -> tuple[Any, Any]:
    """Makes NeMo's quantiser, and its decoder with random weights."""
    modules = _nemo()
    quantizer = modules.GroupFiniteScalarQuantizer(**sizes["vector_quantizer"])
    return quantizer, fill(modules.CausalHiFiGANDecoder(**sizes["audio_decoder"]))


@cache
def _nemo() -> Any:
    """Loads two modules of NeMo by their files. Their imports that decoding does not need are
    replaced while they load.
    """
    loaded = dict(sys.modules)
    folder = package_folder("nemo") / "collections"
    for name in (
        *("omegaconf", "hydra", "transformers", "nemo", "nemo.collections", "nemo.core"),
        *("nemo.collections.asr", "nemo.collections.asr.modules", "nemo.collections.audio"),
        *("nemo.collections.audio.parts", "nemo.collections.audio.parts.utils"),
        *("nemo.collections.audio.parts.utils.transforms", "nemo.collections.common"),
        *("nemo.collections.common.parts", "nemo.core.classes", "nemo.core.classes.common"),
        *("nemo.core.classes.module", "nemo.core.neural_types"),
        *("nemo.core.neural_types.elements", "nemo.core.neural_types.neural_type", "nemo.utils"),
    ):
        sys.modules[name] = EmptyModule(name)
    sys.modules["nemo.utils"].logging = logging  # type: ignore[attr-defined]
    sys.modules["nemo.core.classes.module"].NeuralModule = torch.nn.Module  # type: ignore[attr-defined]
    sys.modules["nemo.core.classes.common"].typecheck = _no_typecheck  # type: ignore[attr-defined]
    module_of("nemo.collections.common.parts.utils", folder / "common" / "parts" / "utils.py")
    codec = module_of("public_codec", folder / "tts" / "modules" / "audio_codec_modules.py")
    sys.modules.clear()
    sys.modules.update(loaded)
    return codec


# Mimi.


def mimi(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of all codebooks, and of the first ones, by `transformers`."""
    model = transformers_mimi(sizes)
    codes = codes_of(2 * _FRAMES, sizes["num_quantizers"], sizes["codebook_size"])
    return of_all_and_fewer(codes, lambda used: model.decode(used).audio_values[0, 0])


def transformers_mimi(sizes: dict[str, Any], attention: str = "eager") -> Any:
    """Makes Mimi of `transformers` with random weights."""
    from transformers import MimiConfig, MimiModel

    return refilled(MimiModel, MimiConfig(**sizes), fill_state, attn_implementation=attention)


# The codec of Pocket TTS.


def pocket_tts(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of latents by `transformers`."""
    from transformers import PocketTTSAudioTokenizerConfig, PocketTTSAudioTokenizerModel

    config = PocketTTSAudioTokenizerConfig(**sizes)
    model = refilled(PocketTTSAudioTokenizerModel, config, fill_state)
    latents = torch.randn(
        2 * _FRAMES, sizes["latent_dim"], generator=torch.Generator().manual_seed(SEED)
    )
    return {"latents": latents, "audio": model.decode(latents[None]).audio_values[0, 0]}


# Mimi in the folders of `moshi`.


def mimi_of_moshi(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of all codebooks, and of the first ones, by `moshi`."""
    model = moshi_mimi(sizes)
    codes = codes_of(2 * _FRAMES, sizes["quantizer"]["n_q"], sizes["quantizer"]["bins"])
    return of_all_and_fewer(codes, lambda used: model.decode(used)[0, 0])


def moshi_mimi(sizes: dict[str, Any]) -> Any:
    """Makes Mimi of `moshi` with random weights. Sizes that are missing are the published ones."""
    os.environ["NO_TORCH_COMPILE"] = "1"
    sys.modules.setdefault("sentencepiece", EmptyModule("sentencepiece"))  # for the text of Moshi
    from moshi.models import loaders  # type: ignore[import-not-found]

    seanet = loaders._seanet_kwargs | sizes.get("seanet", {})
    width = seanet["dimension"]
    quantizer = loaders._quantizer_kwargs | {"input_dimension": width, "output_dimension": width}
    transformer = loaders._transformer_kwargs | {
        "input_dimension": width,
        "output_dimensions": [width],
    }
    config = {
        **loaders._mimi_config,
        **sizes,
        "seanet": seanet,
        "quantizer": quantizer | sizes.get("quantizer", {}),
        "transformer": transformer | sizes.get("transformer", {}),
    }
    model = loaders.get_mimi(None, config, num_codebooks=config["quantizer"]["n_q"])
    return fill(model)


# Qwen3-TTS and Qwen3-Omni.


def qwen3_tts(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of codes, by the decoder of `qwen-tts`' 12 Hz tokenizer."""
    return _audio_of(qwen3_tts_decoder(sizes), sizes)


def qwen3_tts_decoder(sizes: dict[str, Any], attention: str = "eager") -> Any:
    """Makes the decoder of `qwen-tts`' 12 Hz tokenizer with random weights."""
    # Bare packages, because the real ones import much that decoding does not need.
    if "qwen_tts" not in sys.modules:
        root = package_folder("qwen_tts")
        bare_package("qwen_tts", root)
        bare_package("qwen_tts.core", root / "core")
    from qwen_tts.core.tokenizer_12hz import modeling_qwen3_tts_tokenizer_v2 as public

    config = public.Qwen3TTSTokenizerV2DecoderConfig(**sizes)
    return _qwen3(public.Qwen3TTSTokenizerV2Decoder, config, attention)


def qwen3_omni(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of codes, by Code2Wav of `transformers`."""
    return _audio_of(qwen3_omni_code2wav(sizes), sizes)


def qwen3_omni_code2wav(sizes: dict[str, Any], attention: str = "eager") -> Any:
    """Makes Code2Wav of `transformers` with random weights."""
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as public
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
        Qwen3OmniMoeCode2WavConfig,
    )

    theta = sizes.get("rope_theta", 10000.0)
    arguments = {name: value for name, value in sizes.items() if name != "rope_theta"}
    rope = {"rope_type": "default", "rope_theta": theta}
    config = Qwen3OmniMoeCode2WavConfig(**arguments, rope_parameters=rope)
    return _qwen3(public.Qwen3OmniMoeCode2Wav, config, attention)


def _qwen3(network: Any, config: Any, attention: str) -> Any:
    config._attn_implementation = attention
    decoder = network(config).eval()
    fill_qwen3(decoder.state_dict())
    return decoder


def _audio_of(decoder: Any, sizes: dict[str, Any]) -> Golden:
    codes = codes_of(2 * _FRAMES, sizes["num_quantizers"], sizes["codebook_size"])
    return {"codes": codes, "audio": decoder(codes.T[None])[0, 0]}


def _no_typecheck(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda function: function


FAMILIES: Families = {
    "nanocodec": nanocodec,
    "mimi": mimi,
    "mimi_of_moshi": mimi_of_moshi,
    "pocket_tts": pocket_tts,
    "qwen3_tts": qwen3_tts,
    "qwen3_omni": qwen3_omni,
}


def write_families(families: Families, description: str | None) -> None:
    """Writes the golden tensors of the families that the command line names.

    Args:
        families: function of every family, which gets the sizes of `sizes.yaml`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--families", nargs="+", choices=families, default=list(families))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        for family in options.families:
            for name, sizes in SIZES[family].items():
                values = families[family](sizes)
                golden = {key: value.contiguous() for key, value in values.items()}
                path = options.folder / family / f"{name}.safetensors"
                path.parent.mkdir(parents=True, exist_ok=True)
                save_file(golden, path, {"sizes": json.dumps(sizes), "seed": str(SEED)})
                shapes = {key: tuple(value.shape) for key, value in golden.items()}
                print(path, path.stat().st_size, shapes)


if __name__ == "__main__":
    write_families(FAMILIES, __doc__)
