"""Public decoders of other families, built at any size from the packages that their authors' code
is in.

The packages ask for much that decoding never uses. So they are installed without their
dependencies, in an environment of their own. Modules that they import and never call are replaced
by empty modules:

    python -m venv public
    public/bin/pip install torch numpy scipy einops librosa "transformers<5" diffusers conformer
    public/bin/pip install hyperpyyaml omegaconf onnxruntime safetensors matplotlib tqdm
    public/bin/pip install --no-deps cosyvoice-minicpmo==0.1.0 stepaudio2-minicpmo==0.1.1
    public/bin/pip install --no-deps chatterbox-tts==0.1.7 s3tokenizer

GLM-4-Voice is a repository, not a package. Its modules replace those of CosyVoice:

    git clone https://github.com/THUDM/GLM-4-Voice
    PYTHONPATH=GLM-4-Voice public/bin/python -m lab.golden.golden_families tests/data/families \
        --family glm4_voice

`golden_families.py` makes the golden data of tests with it, and `lab/peers/peers.py` compares
speed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any

import torch

from lab.golden.public_packages import EmptyModule, bare_package, package_folder


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder. Sizes without an attribute here are the published sizes.

    Attributes:
        encoder: width of token embedding and conformer.
        encoder_heads, encoder_units: heads, and width of the feed-forward.
        encoder_layers: before the upsampling, and after it.
        channels: width of the U-Net or of the DiT.
        heads, dim_head: of the estimator.
        layers: of the DiT; of the U-Net the middle blocks, and the transformer layers of each
            block.
        vocoder: channels of HiFT's first convolution, and of its F0 predictor.
    """

    encoder: int = 512
    encoder_heads: int = 8
    encoder_units: int = 2048
    encoder_layers: tuple[int, int] = (6, 4)
    channels: int = 256
    heads: int = 8
    dim_head: int = 64
    layers: tuple[int, int] = (12, 4)
    vocoder: tuple[int, int] = (512, 512)


TINY = Sizes(32, 2, 64, (2, 2), 32, 2, 16, (1, 1), (32, 16))
SMALL = Sizes(48, 3, 96, (3, 2), 48, 4, 8, (3, 2), (64, 24))
SIZES = {"tiny": TINY, "small": SMALL}


def prepare_imports() -> None:
    """Makes the packages' modules importable.

    Modules that they need are imported first, because these modules look for installed packages.
    """
    import diffusers.models.lora  # noqa: F401
    import transformers  # noqa: F401

    empty = [
        "torchaudio",
        "torchaudio.compliance",
        "torchaudio.compliance.kaldi",
        "onnx",
        "whisper",
    ]
    empty += [
        "matcha.utils",
        "matcha.utils.pylogger",
        "cosyvoice.llm.llm",
        "cosyvoice.cli.model",
        "s3tokenizer",
    ]
    empty += ["s3tokenizer.utils", "s3tokenizer.model_v2", "chatterbox.models.s3tokenizer"]
    for name in empty:
        module = sys.modules[name] = EmptyModule(name)
        parent, _, child = name.rpartition(".")
        if isinstance(sys.modules.get(parent), EmptyModule):
            setattr(sys.modules[parent], child, module)
    sys.modules["matcha.utils.pylogger"].get_pylogger = lambda *_: None  # type: ignore[attr-defined]
    for name in ("stepaudio2", "chatterbox"):  # their `__init__` would import the language models
        if importlib.util.find_spec(name) is not None:
            bare_package(name, package_folder(name))


def _conformer(module: str, sizes: Sizes, *, stride: int = 2, **more: Any) -> Any:
    """Returns the encoder of CosyVoice2 and Chatterbox with all layers of the same width.

    The public code has a fixed width in two layers, and a fixed stride, which are replaced here.
    """
    source = importlib.import_module(module)
    encoder = source.UpsampleConformerEncoder(
        output_size=sizes.encoder,
        attention_heads=sizes.encoder_heads,
        linear_units=sizes.encoder_units,
        num_blocks=sizes.encoder_layers[0],
        input_layer="linear",
        pos_enc_layer_type="rel_pos_espnet",
        selfattention_layer_type="rel_selfattn",
        input_size=sizes.encoder,
        use_cnn_module=False,
        macaron_style=False,
        **more,
    )
    encoder.pre_lookahead_layer = source.PreLookaheadLayer(sizes.encoder, 3)
    encoder.up_layer = source.Upsample1D(
        channels=sizes.encoder, out_channels=sizes.encoder, stride=stride
    )
    encoder.up_encoders = encoder.up_encoders[: sizes.encoder_layers[1]]
    return encoder


def _estimator(sizes: Sizes) -> dict[str, Any]:
    """Arguments of a U-Net."""
    return {
        "in_channels": 320,
        "out_channels": 80,
        "channels": [sizes.channels],
        "dropout": 0.0,
        "attention_head_dim": sizes.dim_head,
        "n_blocks": sizes.layers[1],
        "num_mid_blocks": sizes.layers[0],
        "num_heads": sizes.heads,
        "act_fn": "gelu",
    }


def _cfm_params() -> Any:
    from omegaconf import DictConfig

    return DictConfig(
        {
            "sigma_min": 1e-6,
            "solver": "euler",
            "t_scheduler": "cosine",
            "training_cfg_rate": 0.2,
            "inference_cfg_rate": 0.7,
            "reg_loss_type": "l1",
        }
    )


def moss_speech_flow(sizes: Sizes) -> Any:
    """MOSS-Speech's flow, without weights. Its code is CosyVoice2's."""
    return cosyvoice2_flow(sizes, vocabulary=20480, rate=12.5, ratio=4, block=5)


def cosyvoice2_flow(
    sizes: Sizes, *, vocabulary: int = 6561, rate: float = 25, ratio: int = 2, block: int = 25
) -> Any:
    """CosyVoice2's flow, without weights.

    Args:
        rate, ratio: tokens per second, and mel frames per token.
        block: tokens of an attention block.
    """
    from cosyvoice.flow.decoder import CausalConditionalDecoder
    from cosyvoice.flow.flow import CausalMaskedDiffWithXvec
    from cosyvoice.flow.flow_matching import CausalConditionalCFM

    decoder = CausalConditionalCFM(
        in_channels=240,
        cfm_params=_cfm_params(),
        spk_emb_dim=80,
        estimator=CausalConditionalDecoder(
            **_estimator(sizes), static_chunk_size=ratio * block, num_decoding_left_chunks=-1
        ),
    )
    encoder = _conformer(
        "cosyvoice.transformer.upsample_encoder", sizes, stride=ratio, static_chunk_size=block
    )
    return CausalMaskedDiffWithXvec(
        input_size=sizes.encoder,
        vocab_size=vocabulary,
        input_frame_rate=rate,
        token_mel_ratio=ratio,
        encoder=encoder,
        decoder=decoder,
    )


def glm4_voice_flow(sizes: Sizes) -> Any:
    """Flow of GLM-4-Voice, without weights. Its code is a variant of CosyVoice1's."""
    return cosyvoice1_flow(
        sizes, "BlockConformerEncoder", "block_rel_selfattn", 16384, 12.5, block_size=2
    )


def cosyvoice1_flow(
    sizes: Sizes,
    encoder_class: str = "ConformerEncoder",
    attention: str = "rel_selfattn",
    vocabulary: int = 4096,
    rate: float = 50,
    **more: Any,
) -> Any:
    """CosyVoice1's flow, without weights.

    Args:
        rate: tokens per second.
        more: further arguments of the encoder.
    """
    from cosyvoice.flow.decoder import ConditionalDecoder
    from cosyvoice.flow.flow import MaskedDiffWithXvec
    from cosyvoice.flow.flow_matching import ConditionalCFM
    from cosyvoice.flow.length_regulator import InterpolateRegulator

    encoder = getattr(importlib.import_module("cosyvoice.transformer.encoder"), encoder_class)(
        output_size=sizes.encoder,
        attention_heads=sizes.encoder_heads,
        linear_units=sizes.encoder_units,
        num_blocks=sizes.encoder_layers[0],
        input_layer="linear",
        pos_enc_layer_type="rel_pos_espnet",
        selfattention_layer_type=attention,
        input_size=sizes.encoder,
        use_cnn_module=False,
        macaron_style=False,
        **more,
    )
    unet = ConditionalDecoder(**{**_estimator(sizes), "channels": [sizes.channels] * 2})
    return MaskedDiffWithXvec(
        input_size=sizes.encoder,
        vocab_size=vocabulary,
        input_frame_rate=rate,
        encoder=encoder,
        length_regulator=InterpolateRegulator(channels=80, sampling_ratios=[1, 1, 1, 1]),
        decoder=ConditionalCFM(
            in_channels=240, cfm_params=_cfm_params(), spk_emb_dim=80, estimator=unet
        ),
    )


def cosyvoice1_hift(sizes: Sizes) -> Any:
    """CosyVoice1's vocoder, without weights. Its other sizes are defaults of the public code."""
    from cosyvoice.hifigan.f0_predictor import ConvRNNF0Predictor
    from cosyvoice.hifigan.generator import HiFTGenerator

    f0 = ConvRNNF0Predictor(cond_channels=sizes.vocoder[1])
    return HiFTGenerator(base_channels=sizes.vocoder[0], f0_predictor=f0)


def hift(module: str, predictor: str, sizes: Sizes) -> Any:
    """HiFT of the second generation, without weights: the same layers in all three packages.

    Args:
        module, predictor: of a package, where its generator and its F0 predictor are.
        sizes: of the decoder.
    """
    f0 = importlib.import_module(predictor).ConvRNNF0Predictor(cond_channels=sizes.vocoder[1])
    return importlib.import_module(module).HiFTGenerator(
        base_channels=sizes.vocoder[0],
        sampling_rate=24000,
        upsample_rates=[8, 5, 3],
        upsample_kernel_sizes=[16, 11, 7],
        source_resblock_kernel_sizes=[7, 7, 11],
        source_resblock_dilation_sizes=[[1, 3, 5]] * 3,
        f0_predictor=f0,
    )


def cosyvoice2_hift(sizes: Sizes) -> Any:
    """CosyVoice2's vocoder, without weights."""
    return hift("cosyvoice.hifigan.generator", "cosyvoice.hifigan.f0_predictor", sizes)


def stepaudio2_flow(sizes: Sizes) -> Any:
    """Flow of Step-Audio2 mini and MiniCPM-o 4.5, without weights.

    Its caches' sizes are fixed there: put in again.
    """
    from stepaudio2.cosyvoice2.flow.decoder_dit import DiT
    from stepaudio2.cosyvoice2.flow.flow import CausalMaskedDiffWithXvec
    from stepaudio2.cosyvoice2.flow.flow_matching import CausalConditionalCFM
    from stepaudio2.cosyvoice2.transformer.upsample_encoder_v2 import UpsampleConformerEncoderV2

    encoder = UpsampleConformerEncoderV2(
        input_size=sizes.encoder,
        output_size=sizes.encoder,
        num_blocks=sizes.encoder_layers[0],
        num_up_blocks=sizes.encoder_layers[1],
        attention_heads=sizes.encoder_heads,
        linear_units=sizes.encoder_units,
    )
    depth, heads, width = sizes.layers[0], sizes.heads, 2 * sizes.dim_head
    estimator = DiT(320, 80, 4.0, depth, heads, sizes.dim_head, sizes.channels)
    decoder = CausalConditionalCFM(estimator, 0.7)
    estimator.att_cache_buffer = torch.zeros(depth, 2, heads, 2000, width)
    estimator.cnn_cache_buffer = torch.zeros(depth, 2, 2 * sizes.channels, 2)
    decoder.att_cache_buffer = torch.zeros(10, depth, 2, heads, 2000, width)
    decoder.cnn_cache_buffer = torch.zeros(10, depth, 2, 2 * sizes.channels, 2)
    return CausalMaskedDiffWithXvec(
        input_size=sizes.encoder, vocab_size=6561, encoder=encoder, decoder=decoder
    )


def stepaudio2_hift(sizes: Sizes) -> Any:
    """Vocoder of Step-Audio2, without weights."""
    module = "stepaudio2.flashcosyvoice.modules.hifigan"
    return hift(module, module, sizes)


def chatterbox_flow(sizes: Sizes, *, meanflow: bool = False) -> Any:
    """Flow of Chatterbox, or of Chatterbox Turbo, without weights."""
    from chatterbox.models.s3gen.decoder import ConditionalDecoder
    from chatterbox.models.s3gen.flow import CausalMaskedDiffWithXvec
    from chatterbox.models.s3gen.flow_matching import CausalConditionalCFM

    decoder = CausalConditionalCFM(
        estimator=ConditionalDecoder(**_estimator(sizes), meanflow=meanflow)
    )
    encoder = _conformer("chatterbox.models.s3gen.transformer.upsample_encoder", sizes)
    return CausalMaskedDiffWithXvec(input_size=sizes.encoder, encoder=encoder, decoder=decoder)


def chatterbox_hift(sizes: Sizes) -> Any:
    """Vocoder of Chatterbox, without weights. Its source turns sample by sample."""
    return hift("chatterbox.models.s3gen.hifigan", "chatterbox.models.s3gen.f0_predictor", sizes)
