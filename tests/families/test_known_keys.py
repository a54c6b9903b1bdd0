"""Keys of published configurations of codecs: each is used, known to be without effect on the
decoder, or refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit.models.codec_models import CODECS, FORMATS
from testkit.models.folders import golden_of
from testkit.tables import table
from token2wav import ConfigError
from token2wav.published.registry import find_family

# Formats whose configuration is JSON or YAML, with the section that belongs to the decoder. Keys
# outside of it belong to other networks.
SECTIONS = {
    "ear_tts": "model.speech_generation.model.codec_config",
    "nanocodec_unpacked": "audio_decoder",
    "qwen3_omni": "code2wav_config",
    "qwen3_tts": "decoder_config",
    "vibevoice_of_microsoft": "acoustic_tokenizer_config",
    "vibevoice_of_transformers": "audio_config",
    "voxcpm": "audio_vae_config",
    "wavtokenizer": "model.init_args",
    "xy_tokenizer": "params",
    "xy_tokenizer_of_its_authors": "generator_params",
}
WHOLE_FILES = (
    *("audex", "causal_dac", "dac", "higgs", "higgs_first_release", "mimi", "moss", "moss_stereo"),
    *(
        "lfm2_audio",
        "mimi_of_moshi",
        "neucodec",
        "pocket_tts",
        "snac",
        "snac_attention",
        "vibevoice",
    ),
)
CHOOSES_THE_FAMILY = {"model_type", "vq_strides", "decoder_rates", "n_q", "bins", "ratios"}
# Keys beside those of another network, in a file that has no section for the decoder
AMONG_OTHERS = {
    "causal_dac": {"num_codebooks", "codebook_size"},
    "higgs": {"semantic_model_config"},
    "neucodec": {"semantic_model_config"},
}

# Keys that published files have in addition to those of the fixtures, from the classes of
# `transformers` and of the authors' packages
PUBLISHED = """
audex | architectures, auto_map, torch_dtype, dtype, transformers_version, _name_or_path
causal_dac | model_type, text_config, semantic_begin_id, fast_dim, n_fast_layer, vocab_size
dac | commitment_loss_weight, codebook_loss_weight, quantizer_dropout, hop_length, torch_dtype
dac | architectures, transformers_version, dtype, initializer_range, _name_or_path
ear_tts | architectures
higgs | kernel_size, channel_ratios, strides, block_dilations, unit_kernel_size, downsample_factor
higgs | semantic_sample_rate, initializer_range, acoustic_model_config.codebook_loss_weight
higgs | acoustic_model_config.hop_length, acoustic_model_config.n_codebooks
lfm2_audio | architectures, block_dim, block_norm_eps, conv_dim_out, full_attn_idxs
lfm2_audio | num_heads, tie_embedding, max_position_embeddings, torch_dtype
mimi | use_streaming, normalize, layer_scale_initial_scale, initializer_range, use_cache
mimi | attention_dropout, max_position_embeddings, tie_word_embeddings, torch_dtype
mimi | encoder_config
mimi_of_moshi | channels, renormalize, seanet.disable_norm_outer_blocks, transformer.conv_layout
mimi_of_moshi | quantizer.input_dimension, transformer.layer_scale
moss | version, encoder_kwargs, quantizer_type, auto_map, compute_dtype, codec_weight_dtype
moss | attention_implementation, quantizer_kwargs.quantizer_type, decoder_kwargs.0.conv_layout
neucodec | encoder_hidden_size, activation_dropout, attention_dropout, max_position_embeddings
neucodec | initializer_range, pad_token_id, transformers_version, dtype
nanocodec_unpacked | audio_encoder, discriminator, optim, train_ds, name, target, nemo_version
pocket_tts | use_streaming, layer_scale_initial_scale, max_position_embeddings, use_cache
pocket_tts | encoder_config
qwen3_omni | thinker_config, talker_config, code2wav_config.layer_scale_initial_scale
qwen3_omni | code2wav_config.attention_dropout, code2wav_config.max_position_embeddings
qwen3_tts | encoder_config, encoder_valid_num_quantizers, input_sample_rate
qwen3_tts | encode_downsample_rate, decoder_config.layer_scale_initial_scale
vibevoice | layer_scale_init_value, initializer_range, vae_std, dtype
vibevoice_of_microsoft | semantic_tokenizer_config, acoustic_tokenizer_config.corpus_normalize
vibevoice_of_microsoft | acoustic_tokenizer_config.fix_std, acoustic_tokenizer_config.std_dist_type
vibevoice_of_microsoft | acoustic_tokenizer_config.weight_init_value, acostic_vae_dim
vibevoice_of_microsoft | acoustic_tokenizer_config.layer_scale_init_value
voxcpm | lm_config, patch_size, audio_vae_config.encoder_dim, audio_vae_config.chunk_size
voxcpm | audio_vae_config.decode_chunk_size, audio_vae_config.cond_dim, device, dtype
wavtokenizer | data, trainer, model.init_args.mel_loss_coeff, model.init_args.mrd_loss_coeff
wavtokenizer | model.init_args.num_warmup_steps, model.init_args.pretrain_mel_steps
wavtokenizer | model.init_args.evaluate_utmos, model.init_args.evaluate_periodicty
wavtokenizer | model.init_args.decay_mel_coeff, model.init_args.resume_config
wavtokenizer | model.init_args.feature_extractor.init_args.bandwidths
wavtokenizer | model.init_args.feature_extractor.init_args.train_codebooks
xy_tokenizer | encoder_downsample_rate, input_sampling_rate, use_cache, initializer_range
xy_tokenizer_of_its_authors | generator_params.feature_extractor_kwargs, output_sample_rate
xy_tokenizer_of_its_authors | generator_params.semantic_encoder_kwargs
xy_tokenizer_of_its_authors | generator_params.downsample_kwargs
"""


def written(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Writes the configuration of a format, and returns its file of sizes with the content."""
    codec, sizes = (CODECS | FORMATS)[name], golden_of(name).sizes
    path = codec.write_document(folder, sizes) / codec.file
    return path, codec.document(sizes)


def keys(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yields the path of every key in a document."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield (*path, key)
            yield from keys(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from keys(value, (*path, index))


@pytest.mark.parametrize("name", [*SECTIONS, *WHOLE_FILES])
def test_a_misspelt_key_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    path, document = written(name, tmp_path)
    read = find_family(tmp_path).read
    start = tuple(SECTIONS[name].split(".")) if name in SECTIONS else ()
    refused = 0
    for key in keys(document):
        skipped = CHOOSES_THE_FAMILY | AMONG_OTHERS.get(name, set())
        if key[: len(start)] != start or key == start or skipped & {*key}:
            continue
        misspelt = json.loads(json.dumps(document))
        place = misspelt
        for part in key[:-1]:
            place = place[part]
        place[f"{key[-1]}x"] = place.pop(key[-1])
        path.write_text(json.dumps(misspelt))
        with pytest.raises(ConfigError, match=rf"\b{key[-1]}x?\b"):
            read(tmp_path)
        refused += 1
    assert refused >= 3


@pytest.mark.parametrize(
    ("name", "known"), table(PUBLISHED), ids=lambda value: value[:40].replace(" ", "")
)
def test_known_keys_are_without_effect(name: str, known: str, tmp_path: Path) -> None:
    path, document = written(name, tmp_path)
    read = find_family(tmp_path).read
    sound = read(tmp_path)
    for key in known.split(", "):
        *outer, last = key.split(".")
        place = document
        for part in outer:
            place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
        place.setdefault(last, 0.5)
    path.write_text(json.dumps(document))
    assert read(tmp_path) == sound
