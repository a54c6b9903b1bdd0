"""Golden tensors of DAC, and of the Higgs Audio tokenizer and SNAC, which have DAC's decoder:
results of their public code with random weights at two small sizes.

The packages are installed without their dependencies, as for `golden_codecs.py`. One of them brings
a package `tests`, which would hide the folder `tests` of this project:

    python -m venv public && public/bin/pip install torch numpy einops safetensors transformers
    public/bin/pip install --no-deps descript-audio-codec==1.0.0 descript-audiotools==0.7.2 \
        snac==1.2.1 boson-multimodal==0.1.1
    rm -r public/lib/python3*/site-packages/tests
    public/bin/python -m lab.golden.golden_dac tests/data/families
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch

from lab.golden.golden_codecs import Families, Golden, codes_of, of_all_and_fewer, write_families
from lab.golden.public_packages import (
    EmptyModule,
    bare_package,
    module_of,
    package_folder,
    refilled,
)
from testkit.models.random_weights import fill_dac
from token2wav.layers.position_noise import noise_table

_FRAMES = 24  # frames of the codes

# DAC of `transformers`.


def dac(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of all codebooks, and of the first ones, by `transformers`."""
    model = transformers_dac(sizes)
    codes = codes_of(_FRAMES, sizes["n_codebooks"], sizes["codebook_size"])
    return of_all_and_fewer(codes, lambda used: model.decode(audio_codes=used).audio_values[0])


def transformers_dac(sizes: dict[str, Any]) -> Any:
    """Makes DAC of `transformers` with random weights."""
    from transformers import DacConfig, DacModel

    return refilled(DacModel, DacConfig(**sizes), fill_dac)


# DAC of `descript-audio-codec`.


def dac_of_descript(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of all codebooks, and of the first ones, by
    `descript-audio-codec`. Checks that its file of weights is a pickle of tensors and plain values.
    """
    model = descript_dac(sizes)
    with TemporaryDirectory() as folder:
        path = model.save(str(Path(folder) / "weights.pth"), package=False)
        saved = torch.load(path, weights_only=True)
    assert sizes.items() <= saved["metadata"]["kwargs"].items()
    assert saved["state_dict"].keys() == model.state_dict().keys()
    codes = codes_of(_FRAMES, sizes["n_codebooks"], sizes["codebook_size"])
    from_codes = model.quantizer.from_codes
    return of_all_and_fewer(codes, lambda used: model.decode(from_codes(used)[0])[0, 0])


def descript_dac(sizes: dict[str, Any]) -> Any:
    """Makes DAC of `descript-audio-codec` with random weights."""
    _import_descript()
    from dac.model.dac import DAC  # type: ignore[import-not-found]

    model = DAC(**sizes).eval()
    fill_dac(model.state_dict())
    return model


def _import_descript() -> None:
    if "dac" not in sys.modules:
        # Bare packages, because the real ones import much that decoding does not need.
        root, audiotools = package_folder("dac"), package_folder("audiotools")
        for name in ("dac", "dac.model", "dac.nn"):
            bare_package(name, root.joinpath(*name.split(".")[1:]))
        for name in ("audiotools", "audiotools.ml", "tqdm"):
            sys.modules.setdefault(name, EmptyModule(name))
        base = module_of("audiotools_base", audiotools / "ml" / "layers" / "base.py")
        sys.modules["audiotools.ml"].BaseModel = base.BaseModel  # type: ignore[attr-defined]


# The Higgs Audio tokenizer.


def higgs(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of all codebooks, and of the first ones, by `transformers`."""
    model = transformers_higgs(sizes)
    codes = codes_of(_FRAMES, model.config.num_quantizers, sizes["codebook_size"])
    return of_all_and_fewer(codes, lambda used: model.decode(used).audio_values[0, 0])


def transformers_higgs(sizes: dict[str, Any]) -> Any:
    """Makes the Higgs Audio tokenizer of `transformers` with random weights."""
    from transformers.utils import import_utils

    sys.modules.setdefault("torchaudio", EmptyModule("torchaudio"))  # resamples audio to encode
    import_utils.BACKENDS_MAPPING["torchaudio"] = (lambda: True, "")
    from transformers.models.higgs_audio_v2_tokenizer import (
        configuration_higgs_audio_v2_tokenizer as configuration,
    )
    from transformers.models.higgs_audio_v2_tokenizer import (
        modeling_higgs_audio_v2_tokenizer as public,
    )

    config = configuration.HiggsAudioV2TokenizerConfig(**sizes)
    return refilled(public.HiggsAudioV2TokenizerModel, config, fill_dac)


# The first release of the Higgs Audio tokenizer.


def higgs_first_release(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of all codebooks, and of the first ones, by `boson-multimodal`.
    Checks that a file of its weights is a pickle of tensors.
    """
    model = boson_higgs(sizes)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.pth"
        torch.save(model.state_dict(), path)
        assert torch.load(path, weights_only=True).keys() == model.state_dict().keys()
    codes = codes_of(_FRAMES, sizes["n_q"], sizes["bins"])
    return of_all_and_fewer(codes, lambda used: torch.from_numpy(model.decode(used))[0, 0])


def boson_higgs(sizes: dict[str, Any]) -> Any:
    """Makes the Higgs Audio tokenizer of `boson-multimodal` with random weights."""
    import transformers

    _import_descript()
    root = package_folder("boson_multimodal")
    for name in ("boson_multimodal", "boson_multimodal.audio_processing"):
        bare_package(name, root.joinpath(*name.split(".")[1:]))
    for name in ("torchaudio", "librosa", "omegaconf", "vector_quantize_pytorch"):
        sys.modules.setdefault(name, EmptyModule(name))
    from boson_multimodal.audio_processing.higgs_audio_tokenizer import (  # type: ignore[import-not-found]
        HiggsAudioTokenizer,
    )

    semantic_model = mock.Mock(return_value=torch.nn.Identity())  # it only makes codes
    with mock.patch.object(transformers.AutoModel, "from_pretrained", semantic_model):
        model = HiggsAudioTokenizer(**sizes, device="cpu").eval()
    fill_dac(model.state_dict())
    return model


# SNAC.

# Codes of a token, by codebook, in the order in which language models emit them.
_SNAC_ORDER = {
    (8, 4, 2, 1): [[0], [1, 8], [2, 5, 9, 12], [3, 4, 6, 7, 10, 11, 13, 14]],
    (4, 2, 1): [[0], [1, 4], [2, 3, 5, 6]],
    (4, 1): [[0], [1, 2, 3, 4]],
    (2, 1): [[0], [1, 2]],
}


def snac(sizes: dict[str, Any]) -> Golden:
    """Computes the audio of codes by `snac`, with this project's noise and without noise."""
    strides = sizes["vq_strides"]
    of_a_token = sum(strides[0] // stride for stride in strides)
    codes = codes_of(_FRAMES, of_a_token, sizes["codebook_size"])
    model = public_snac(sizes)
    golden = {"codes": codes}
    for name, noise in (("audio", _noise_of_project), ("audio_without_noise", _no_noise)):
        with mock.patch("torch.randn", noise(len(sizes["decoder_rates"]))):
            golden[name] = model.decode(by_codebook(codes.T[None], strides))[0, 0]
    return golden


def by_codebook(codes: torch.Tensor, strides: list[int]) -> list[torch.Tensor]:
    """Splits codes (streams, codes of a token, tokens) into the codes of each codebook, as `snac`
    takes them: (streams, tokens * codes of the codebook in a token).
    """
    order = _SNAC_ORDER[tuple(strides)]
    return [codes[:, places].transpose(1, 2).flatten(1) for places in order]


def public_snac(sizes: dict[str, Any]) -> Any:
    """Makes SNAC of `snac` with random weights."""
    from snac import SNAC  # type: ignore[import-not-found]

    model = SNAC(**sizes).eval()
    fill_dac(model.state_dict())
    return model


def _noise_of_project(layers: int) -> Callable[..., torch.Tensor]:
    """Returns a replacement of `torch.randn`, which the layers of the decoder call in turn."""
    tables = [noise_table(seed) for seed in range(layers)]
    return lambda shape, **_: tables.pop(0)[: shape[2]].expand(shape)


def _no_noise(layers: int) -> Callable[..., torch.Tensor]:
    return lambda shape, **_: torch.zeros(shape)


FAMILIES: Families = {
    "dac": dac,
    "dac_of_descript": dac_of_descript,
    "higgs": higgs,
    "higgs_first_release": higgs_first_release,
    "snac": snac,
    "snac_attention": snac,
}


if __name__ == "__main__":
    write_families(FAMILIES, __doc__)
