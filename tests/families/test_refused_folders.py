"""Folders that are refused: each row names a family, an edit of its folder, and a part of the one
sentence that says what is wrong, and where.

`test_absurd_sizes.py` tries absurd values of every number.
"""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from testkit.models.codec_models import CODECS, write_archive
from testkit.models.family_golden import FamilyGolden
from testkit.models.folder_edits import (
    ABSENT,
    Edit,
    changed_document,
    content,
    into,
    link,
    removed,
    replaced,
    set_values,
    set_weights,
    tensor,
    write_folder,
)
from testkit.models.tiny_model import TINY, tiny_weights
from testkit.tables import table
from token2wav import CheckpointError, ConfigError, RuntimeConfig, Token2Wav, Token2WavError
from token2wav.assembly import check_folder


@dataclass(frozen=True)
class Refusal:
    """Row of the table.

    Attributes:
        family: name of a folder in `folder_edits.py`.
        edit: makes the folder wrong.
        sentence: part of the message; ` ... ` stands for any text.
        name: names the row among those of the family.
        error: class of the error.
    """

    family: str
    edit: Edit
    sentence: str
    name: str
    error: type[Token2WavError] = Token2WavError

    def __str__(self) -> str:
        return f"{self.family}: {self.name[:80]}"


Section = tuple[str, str, str, list[tuple[str, ...]]]


def sections(text: str) -> Iterator[Section]:
    """Yields the parts of a text: the family, the file, the start of all names, and the rows.

    The heading of a part is `[family: file]` or `[family: file: start]`. A long row continues on
    the next line.
    """
    for part in text.strip().split("\n["):
        heading, _, rows = part.removeprefix("[").partition("]\n")
        family, file, *start = heading.split(": ")
        yield family, file, f"{start[0]}." if start else "", table(rows.replace("\n    |", " |"))


def assigned(text: str, start: str) -> dict[str, str]:
    """Reads assignments, which are divided by semicolons."""
    pairs = (assignment.split(" = ") for assignment in text.split("; "))
    return {start + name: value for name, value in pairs}


def values(text: str) -> Iterator[Refusal]:
    """Yields rows that set values, in JSON, of a file."""
    for family, file, start, rows in sections(text):
        for assignments, sentence in rows:
            changes = {
                path: value if value == ABSENT else json.loads(value)
                for path, value in assigned(assignments, start).items()
            }
            yield Refusal(family, set_values(file, changes), sentence, assignments, ConfigError)


def weights(text: str) -> Iterator[Refusal]:
    """Yields rows that set tensors of a file; `tensor` says how they are written. The file may get
    another name after an arrow.
    """
    for family, files, start, rows in sections(text):
        file, _, target = files.partition(" -> ")
        for assignments, sentence in rows:
            changes = {name: tensor(value) for name, value in assigned(assignments, start).items()}
            edit = set_weights(file, changes, target)
            yield Refusal(family, edit, sentence, assignments, CheckpointError)


def lines(text: str) -> Iterator[Refusal]:
    """Yields rows that replace a text of a file."""
    for family, file, _, rows in sections(text):
        for old, new, sentence in rows:
            edit = replaced(file, old, new)
            yield Refusal(family, edit, sentence, f"{old} -> {new}", ConfigError)


RAND_NOISE, SINES = "cfm.rand_noise", "sinegen.sine_waves"


def noise(name: str, table: torch.Tensor) -> Edit:
    """Adds a file with a table of noise."""
    return lambda folder: save_file({name: table}, folder / "noise.safetensors")


def cut(name: str, keep: float, target: str = "") -> Edit:
    """Cuts a file of weights, after it has got another name."""

    def edit(folder: Path) -> None:
        set_weights(name, {}, target)(folder)
        path = folder / (target or name)
        path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])

    return edit


def pickled(change: Callable[[dict[str, Any]], object]) -> Edit:
    """Replaces the weights of the flow by another object, in a pickle."""

    def edit(folder: Path) -> None:
        path = folder / "flow.safetensors"
        torch.save(change(load_file(path)), folder / "flow.pt")
        path.unlink()

    return edit


def archive(members: dict[str, bytes]) -> Edit:
    """Replaces the archive of NanoCodec."""
    return lambda folder: write_archive(folder / "codec.nemo", members)


def member(kind: bytes, size: int = 0) -> Edit:
    """Replaces the archive of NanoCodec by the head of its first member."""
    info = tarfile.TarInfo("model_config.yaml")
    info.type, info.size = kind, size
    info.linkname = "" if size else "/etc/passwd"
    return content("codec.nemo", info.tobuf() + bytes(0 if size else 1024))


def weights_twice(folder: Path) -> None:
    """Adds a second file of weights of Moshi, and removes the file that names one of them."""
    (folder / "config.json").unlink()
    (folder / "tokenizer-2-checkpoint5.safetensors").touch()


def saved(content: object) -> bytes:
    """Returns a pickle."""
    file = BytesIO()
    torch.save(content, file)
    return file.getvalue()


NANOCODEC = CODECS["nanocodec"].document(FamilyGolden("nanocodec", "tiny").sizes)
YAML = yaml.safe_dump(NANOCODEC).encode()
CODE = saved({"audio_decoder.pre_conv.conv.bias": Path("/")})
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 34\n"
PAGE = "\n<!DOCTYPE html>\n<html><body>Log in</body></html>"
LFS = ": a pointer of Git LFS, not the file itself; run 'git lfs pull' in the clone, or pull"
HTML = ": a page of HTML, not the file itself; download it again"
GONE = "which does not exist; "
NONE_OF = "contains none of model.safetensors, "
LONG = "9" * 5000

VALUES = """
[mimi: config.json]
use_causal_conv = false              | use_causal_conv: False is not supported
attention_bias = true                | attention_bias: True is not supported
pad_mode = "reflect"                 | is not one of constant
audio_channels = 2                   | is not between 1 and 1
num_key_value_heads = 1              | they must be equal
num_semantic_quantizers = 4          | is not below num_quantizers, 4
upsample_groups = 3                  | does not divide hidden_size
head_dim = 7                         | head_dim: 7 is odd
frame_rate = 13.0                    | upsampling_ratios give
num_hidden_layers = 1000000000       | is not between 1 and 256
sliding_window = 1                   | is not between 2
rope_parameters = {"rope_type": "yarn"} | rope_parameters.rope_type: 'yarn' is not supported
hidden_size = "16"                   | expected int
upsampling_ratios = []               | empty; at least 1
model_type = "bert"                  | has the model_type 'bert', expected one of ... mimi
model_type = "csm"; codec_config = {"model_type": "mimi"}
    | that of a whole model, 'csm', whose codec is mimi (codec_config); use a folder of the codec
model_type = "moshi"; audio_encoder_config = {"model_type": "mimi"}
    | 'moshi', whose codec is mimi (audio_encoder_config); use ... alone, such as mimi
hidden_sise = 16                     | hidden_sise: unknown key; did you mean hidden_size?
rope_theta = 5000.0
    | rope_theta: 5000.0, but rope_parameters.rope_theta is 10000.0; they must be equal
[mimi_of_moshi: config.json]
mimi_name = "../x.safetensors"       | mimi_name: '../x.safetensors' is no file of the folder
mimi_name = "hf://kyutai/moshi/x"    | mimi_name: 'hf://kyutai/moshi/x' is no file of the folder
mimi_name = 3                        | mimi_name: 3 is no file of the folder
mimi_config_name = "none.json"       | mimi_config_name: 'none.json' is no file of the folder
[mimi_of_moshi: mimi_config.json]
seanet.causal = false                | seanet.causal: False is not supported; expected True
seanet.true_skip = false             | seanet.true_skip: False is not supported; expected True
seanet.norm = "weight_norm"          | seanet.norm: 'weight_norm' is not supported; expected
seanet.dimension = 1000000000; transformer.d_model = 1000000000
    | seanet.dimension: 1000000000 is not between
seanet.trim_right_ratio = 0.5        | seanet.trim_right_ratio: 0.5 is not between
transformer.causal = false           | transformer.causal: False is not supported
transformer.gating = "silu"          | transformer.gating: 'silu' is not supported; expected
transformer.d_model = 32             | but seanet.dimension is 16; they must be equal
quantizer.bins = "16"                | quantizer.bins: expected int
[dac: config.json]
downsampling_ratios = []             | empty; at least 1
upsampling_ratios = [5, 5]           | 25 samples for each frame, but downsampling_ratios give 24
decoder_hidden_size = 12             | 12 cannot be halved 3 times
encoder_hidden_size = 65536          | 524288 channels of the latents; at most 65536
hidden_size = 1000000000             | is not between 1 and 65536
sampling_rate = 768000               | frames per second: 32000.0 is not between 0.01 and 1000
[dac_of_descript: weights.pth: metadata.kwargs]
decoder_rates = [4, 1000000000]      | kwargs.decoder_rates ... is not between 1 and 4096
codebook_dim = [4, 4]                | kwargs.codebook_dim: expected int
latent_dim = -1                      | kwargs.latent_dim: -1 is not between 1 and 65536
n_codebooks = 1180591620717411303424 | kwargs.n_codebooks ... is not between 1 and 64
decoder_dim = 30                     | 30 cannot be halved 2 times
[higgs: config.json]
target_bandwidths = []               | target_bandwidths: empty
target_bandwidths = [0.01]           | target_bandwidths: number of codebooks: 0 is not
target_bandwidths = [1000]           | target_bandwidths: number of codebooks: 3125 is not
target_bandwidths = 2                | target_bandwidths: expected
codebook_size = 1                    | codebook_size: 1 is not between 2 and
sample_rate = 768000                 | frames per second: 25600.0 is not between
acoustic_model_config = [1]          | acoustic_model_config: expected an object
acoustic_model_config.upsampling_ratios = [5, 5] | upsampling_ratios: 25 samples ... give 30
acoustic_model_config.decoder_hidden_size = 36 | config.decoder_hidden_size: 36 cannot
acoustic_model_config.hidden_size = 1000000000
    | acoustic_model_config.hidden_size: 1000000000 is not
semantic_model_config.hidden_size = 1000000000
    | semantic_model_config.hidden_size: 1000000000 is not
[higgs_first_release: config.json]
codebook_dim = null                  | codebook_dim: missing
ratios = []                          | ratios: empty; at least 1 is needed
vq_scale = 1000                      | vq_scale: 1000 leaves no channel of 780
sample_rate = 768000                 | frames per second: 128000.0 is not between
[snac: config.json]
vq_strides = []                      | vq_strides: empty
vq_strides = [4, 3, 1]               | vq_strides: 4 is no multiple of 3
vq_strides = [1, 2]                  | vq_strides: 1 is no multiple of 2
vq_strides = [64, 1]                 | vq_strides: 65 codes for each token; at most 64
vq_strides = [4, 0]                  | is not between 1 and 64
vq_strides = 4                       | vq_strides: expected
decoder_rates = [5, 5]               | 25 samples for each frame, but
decoder_dim = 30                     | 30 cannot be halved
noise = "yes"                        | noise: expected
sampling_rate = 1; decoder_rates = [64, 64]; encoder_rates = [64, 64]
    | frames per second: ... is not between 0.01 and 1000
[snac_attention: config.json]
attn_window_size = 10                | attn_window_size: 10 is no multiple of 4, the latents of a
attn_window_size = 1048576           | attn_window_size: 1048576 is not between 1 and 1024
attn_window_size = "32"              | attn_window_size: expected
decoder_dim = 96                     | decoder_dim: 96 is no multiple of 64, the channels of an
[streamflow: streamflow.yaml: flow]
layers = 3                           | flow: unknown key 'layers'; expected one of type, vocab_size
type = "dit"                         | flow.type: 'dit' is not one of streamflow
forward_layers = [5]                 | flow.forward_layers: 5 is not one of the layers 1 to 4
forward_layers = [2]                 | flow.forward_layers: layer 2 already has the mask backward
backward_layers = [3, 3]             | flow.backward_layers: layer 3 already has the mask backward
block_frames = 26                    | flow.block_frames: 26 is no multiple of 4, the frames of
chunk_blocks = 0                     | flow.chunk_blocks: 0 is not between 1 and 1000
dim = "wide"                         | flow.dim: expected int, got 'wide'
input_frame_rate = 50                | hop_size is 160 instead of 80
mel_bands = 100                      | num_mels is 80 instead of 100
[nanocodec_unpacked: model_config.yaml]
audio_decoder._target_ = "nemo.HiFiGANDecoder" | expected CausalHiFiGANDecoder
vector_quantizer._target_ = 3        | expected GroupFiniteScalarQuantizer
audio_decoder.input_dim = 7
    | audio_decoder.input_dim: 7, but num_groups and num_levels_per_group give 6; they must
audio_decoder.base_channels = 36     | audio_decoder.base_channels: 36 cannot be halved 3 times
audio_decoder.up_sample_rates = []   | empty; at least 1
audio_decoder.activation = "elu"     | is not one of half_snake
vector_quantizer.num_levels_per_group = [4096, 4096, 4096] | codes; at most
vector_quantizer.num_levels_per_group = [1] | is not between 2 and 4096
samples_per_frame = 25               | samples_per_frame: 25, but
[moss: config.json]
number_channels = 0                  | number_channels: 0 is not between 1 and 2
number_channels = 3                  | number_channels: 3 is not between 1 and 2
number_channels = "2"                | number_channels: expected int, got '2'
number_channels = 2
    | downsample_rate: 1920, but the patches have 960 samples of each
downsample_rate = 960
    | downsample_rate: 960, but the patches have 1920 samples of each
causal_transformer_context_duration = 0.05 | [0]: a window of 1 positions
causal_transformer_context_duration = 10000 | a window of 125000 positions; 2 to 65536
decoder_kwargs = {}                  | decoder_kwargs: expected a list, got dict
decoder_kwargs = []                  | decoder_kwargs: empty; at least 1 is needed
decoder_kwargs = [3]                 | decoder_kwargs[0]: expected an object, got int
decoder_kwargs = [{"module_type": "Flow"}] | 'Flow' is neither Transformer nor Patched
quantizer_kwargs = [1]               | quantizer_kwargs: expected a mapping, got list
quantizer_kwargs.num_quantizers = 65 | num_quantizers: 65 is not between 1 and 64
quantizer_kwargs.output_dim = 9      | input_dimension: 8, but the part before it has 9
decoder_kwargs.0.d_model = 15        | decoder_kwargs[0].d_model: 15 is no multiple of 4
decoder_kwargs.0.causal = false      | decoder_kwargs[0].causal: False is not
decoder_kwargs.0.norm = "rms_norm"   | decoder_kwargs[0].norm: ... layer_norm
decoder_kwargs.0.context_duration = 0 | context_duration: 0.0 is not between 0.001 and
decoder_kwargs.0.layer_scale = null  | decoder_kwargs[0].layer_scale: expected
decoder_kwargs.1.patch_size = 5      | patch_size: 5 does not divide 24 channels
decoder_kwargs.3.patch_size = 480    | the last part has 2 channels, expected 1
[moss_stereo: config.json]
enable_channel_interleave = false    | enable_channel_interleave: expected true
[causal_dac: config.json]
model_type = "llama"                 | 'llama' is not supported; expected one of dual_ar, fish_qwen3
codec_filename = "other.pth"         | codec_filename: ... 'other.pth'
num_codebooks = 1                    | num_codebooks: 1 is not between 2 and 64
codec_frame_size = 512               | 512, but codec_downsample_factor and ... give 12
codec_post_n_local_heads = 3         | 3 does not divide codec_post_n_head, 4
codec_head_dim = 7                   | codec_head_dim: 7 is odd
codec_decoder_rates = []             | codec_decoder_rates: empty
codec_decoder_dim = 6                | codec_decoder_dim: 6 cannot be halved 2 times
[vibevoice_of_microsoft: config.json: acoustic_tokenizer_config]
causal = false                       | causal: False is not supported; expected True
layernorm = "LN"                     | layernorm: 'LN' is not supported
encoder_depths = "3-x"               | '3-x' is no list of numbers such as 3-3-8
encoder_depths = "3-3"
    | config.encoder_depths: 2 items, but downsampling_ratios has 3; 4 are needed
decoder_ratios = [0, 1, 1]           | decoder_ratios[2]: 0 is not between
vae_dim = "64"                       | vae_dim: expected int
channels = 2                         | channels: 2 is not between 1 and 1
decoder_n_filters = 32768            | more than 65536 channels after 3 doublings
layernorm_eps = 0                    | layernorm_eps: 0.0 is not between
[vibevoice_of_transformers: config.json]
audio_config = -                     | this folder has no acoustic decoder
audio_config = []                    | audio_config: expected an object
[voxcpm_safetensors: config.json: audio_vae_config]
out_sample_rate = 24000
    | out_sample_rate: 24000, but sample_rate, encoder_rates and decoder_rates give 1200;
decoder_rates = [8, 6, 5]            | out_sample_rate: ... and decoder_rates give 24000
sample_rate = 24000                  | out_sample_rate: ... and decoder_rates give
decoder_rates = []                   | decoder_rates: empty
encoder_rates = []                   | encoder_rates: empty
decoder_dim = 2049                   | decoder_dim: 2049 cannot be halved
use_noise_block = true               | use_noise_block: True is not supported; expected False
cond_out_layer = true                | cond_out_layer: True is not supported; expected False
cond_type = "add"                    | cond_type: 'add' is not one of scale_bias, scale_bias_init
sr_bin_boundaries = [3, 2]           | sr_bin_boundaries: [3, 2] are not in ascending order
[voxcpm_safetensors: config.json]
architecture = "voxcpm3"             | architecture: 'voxcpm3' is not one of voxcpm, voxcpm2
audio_vae_config = [1]               | audio_vae_config: expected an object, got list
[qwen3_tts: config.json: decoder_config]
attention_bias = true                | attention_bias: True is not supported
hidden_act = "relu"                  | is not one of silu
num_key_value_heads = 1              | they must be equal
head_dim = 7                         | head_dim: 7 is odd
sliding_window = 1                   | is not between 2
upsample_rates = []                  | empty; at least 1
decoder_dim = 18                     | cannot be halved 2 times
rope_parameters = {"rope_type": "yarn"} | 'yarn' is not supported
[qwen3_omni: config.json: code2wav_config]
attention_bias = true                | attention_bias: True is not supported
hidden_act = "relu"                  | is not one of silu
rope_parameters = {"rope_type": "yarn"} | 'yarn' is not supported
[qwen3_tts: config.json]
decode_upsample_rate = 1920          | upsampling_ratios give 24
decoder_config = null                | this folder has no decoder
[qwen3_omni: config.json]
code2wav_config = -                  | code2wav_config: expected an object
[qwen25_omni: config.json: token2wav_config]
dit_config.look_ahead_layers = [0]   | look_backward_layers: layer 0 is in look_ahead_layers too
dit_config.block_size = 7
    | dit_config.block_size: 7 is no multiple of 2, the frames of a code
dit_config.head_dim = 15             | head_dim: 15 is odd
dit_config.enc_channels = [8, 8, 8, 8, 32] | enc_channels: [8, 8, 8, 8, 32] do not fit
dit_config.enc_dilations = [1, 1]    | enc_dilations: 2 items, but enc_channels has 5
dit_config.enc_kernel_sizes = [5, 3, 4, 3, 1] | enc_kernel_sizes[2]: 4 is even
dit_config.enc_res2net_scale = 3     | enc_res2net_scale: 3 does not divide block_channels, 8
dit_config.mel_dim = 11              | bigvgan_config.mel_dim: 10, but dit_config.mel_dim is 11
dit_config.rope_theta = 5000         | rope_theta: 5000 is not supported; expected 10000
dit_config.rope_parameters = {"rope_type": "yarn"}
    | rope_parameters.rope_type: 'yarn' is not supported; expected 'default'
dit_config.num_hidden_layers = "many" | dit_config.num_hidden_layers
dit_config.long_skip_connection = true | dit_config.long_skip_connection: True is not supported
dit_config.look_ahaed_layers = [1]   | look_ahaed_layers: unknown key; did you mean
bigvgan_config.use_bias_at_final = true | bigvgan_config.use_bias_at_final: True is not supported
[qwen25_omni: config.json]
token2wav_config = null              | token2wav_config: expected an object, got NoneType
token2wav_config = []                | token2wav_config: expected an object, got list
[ear_tts: config.json: model.speech_generation.model.codec_config]
rates = -                            | rates: missing
rates = [3]                          | channel_mult: 2 items, but rates has 1; 1 are needed
wav_to_token_ratio = 25              | wav_to_token_ratio: 25, but rates and hop_length give 24
hop_length = 16; wav_to_token_ratio = 96 | hop_length: 16 is not below n_fft, 16
groups = 4                           | groups: 4 does not divide 6 channels
base_hidden_size = 65536             | more than 65536
[ear_tts: config.json]
model.speech_generation = -          | codec_config: expected an object; ... has no decoder
[lfm2_audio: config.json]
layer_types = ["conv"]                | num_hidden_layers: 4, but layer_types give 1
layer_types = ["conv", "conv", "conv", "mamba"] | layer_types[3]: 'mamba' is not one of conv
num_key_value_heads = 3               | 3 does not divide num_attention_heads, 4
conv_L_cach = 3                       | conv_L_cach: unknown key; did you mean conv_L_cache
rope_parameters = {"rope_type": "yarn"} | rope_parameters.rope_type: 'yarn' is not supported
[xy_tokenizer: config.json]
params = -                           | params: expected an object; ... has no decoder
params.vocos_kwargs.hop_sice = 4     | params.vocos_kwargs.hop_sice: unknown key; did you mean
params.vocos_kwargs.hop_size = 28    | sampling_rate: 104, but hop_length and hop_size give 112
params.vocos_kwargs.n_fft = 26       | hop_size: 26 is not below ... 26
params.vocos_kwargs.padding = "center" | vocos_kwargs.padding: 'center' is not one of same
params.vocos_kwargs.adanorm_num_embeddings = 4 | adanorm_num_embeddings: 4 is not supported
params.upsample_kwargs.d_model = 9   | upsample_kwargs.d_model: 9, but ... d_model is 8; they must
params.upsample_kwargs.stride = 3    | output_dim: 32, but d_model and stride give 24
params.post_rvq_adapter_kwargs.output_dim = 31 | output_dim: 31, but ... is 32; they must be equal
params.post_rvq_adapter_kwargs.max_source_positions = 16 | 16, but 30 s, ... give 15
params.acoustic_decoder_kwargs.max_audio_seconds = 60 | max_audio_seconds: 60 is not supported
params.acoustic_decoder_kwargs.kernel_size = 5 | kernel_size: 5 is not supported; expected 3
params.acoustic_decoder_kwargs.decoder_attention_heads = 3 | 3 does not divide ... 8
params.quantizer_kwargs.codebook_dim = 5 | codebook_dim: 5, but ... is 6; they must be equal
params.decoder_upsample_rate = 207   | decoder_upsample_rate: 207, but strides and hop_size give 208
[audex: config.json]
heads = 2                            | hidden_dim: 32, but heads and pos_meb_dim give 16
heads = 5; pos_meb_dim = 6           | hidden_dim: 32, but heads and pos_meb_dim give 30
codebook_levels = [4, 4, 5]          | codebook_size: 64, but codebook_levels give 80
codebook_levels = [8, 8]             | token_embed_dim: 3, but codebook_levels give 2
lookahead_steps = 0                  | lookahead_steps: 0 is not between 1 and 64
embed_tokens_from_codes = false      | embed_tokens_from_codes: False is not supported
window = 9                           | window: unknown key
[wavtokenizer: wavtokenizer_small.yaml: model.init_args]
backbone.class_path = "decoder.models.VocosResNetBackbone" | class_path: 'decoder.models.VocosRes
backbone.init_args.dim = 72          | head.init_args.dim: 64, but ... dim is 72; they must be equal
backbone.init_args.adanorm_num_embeddings = null | adanorm_num_embeddings: expected int, got None
head.init_args.padding = "center"    | padding: 'center' is not one of same
head.init_args.hop_length = 14       | hop_length: 14, but dowmsamples give 12
head.init_args.n_fft = 12            | hop_length: 12 is not below
[neucodec: config.json]
hidden_size = 40                     | hidden_size: 40 is no multiple of 32, the groups of a norm
num_key_value_heads = 1              | num_key_value_heads: 1, but num_attention_heads is 2
attention_bias = true                | attention_bias: True is not supported; expected False
hidden_act = "gelu"                  | hidden_act: 'gelu' is not one of silu
quantization_levels = [4096, 4096]   | quantization_levels: 16777216 codes; at most 1048576
input_sampling_rate = 1700           | input_sampling_rate: 1700 does not divide input_samples
downsampling_ratios = [2, 5, 5]      | downsampling_ratios: 75 is odd; the samples of a code
downsampling_ratios = [4096, 4]      | downsampling_ratios: ... samples of a code; at most 2
rope_parameters = {"rope_type": "yarn"} | rope_parameters.rope_type: 'yarn' is not supported
[pocket_tts: config.json]
hidden_act = "relu"                  | hidden_act
upsampling_ratios = []               | empty; at least 1
[bigvgan: bigvgan/config.json]
snake_logscale = null                | snake_logscale: expected bool, got None
snake_logscale = 1                   | snake_logscale: expected bool, got 1
snake_logscale = -                   | snake_logscale: missing
resblock = "3"                       | resblock: '3' is not one of 1, 2
activation = "relu"                  | activation: 'relu' is not one of snake, snakebeta
num_mels = "80"                      | num_mels: expected int, got '80'
upsample_rates = 4                   | upsample_rates: expected a list, got int
upsample_rates = []; upsample_kernel_sizes = [] | upsample_rates: empty
resblock_dilation_sizes = [[]]       | resblock_dilation_sizes[0]: empty
resblock_dilation_sizes = [[0]]      | resblock_dilation_sizes[0][0]: 0 is not between 1 and 4096
upsample_kernel_sizes = [8]          | upsample_kernel_sizes: 1 items, but upsample_rates has 2
resblock_kernel_sizes = [3, 5]
    | resblock_dilation_sizes: 1 items, but resblock_kernel_sizes has 2
resblock_kernel_sizes = [4]          | resblock_kernel_sizes[0]: 4 is even
upsample_kernel_sizes = [2, 20]      | upsample_kernel_sizes[0]: 2 must equal the rate 16
upsample_kernel_sizes = [32, 21]     | upsample_kernel_sizes[1]: 21 must equal the rate 10
upsample_initial_channel = 1         | upsample_initial_channel: 1 is too small for 2 stages
hop_size = 256                       | hop_size: 256, but upsample_rates give 160; they must be
num_mels = 80                        | BigVGAN: num_mels is 80 instead of 20; use a BigVGAN
"""

WEIGHTS = f"""
[mimi: model.safetensors: quantizer.acoustic_residual_vector_quantizer.layers.1.codebook]
embed_sum = - | quantizer.acoustic: codebook 1 lacks embed_sum
cluster_usage = ones 3 | cluster_usage has different shapes in the codebooks
[mimi: model.safetensors]
decoder.layers.0.conv.bias = - | 1 missing: decoder.layers.0.conv.bias
[mimi_of_moshi: tokenizer-0123abcd-checkpoint125.safetensors]
decoder_transformer.transformer.layers.1.self_attn.in_projs.0.weight = ones 5 16
    | 3 missing: ... q_proj.weight
[dac: model.safetensors]
quantizer.quantizers.1.codebook.weight = - | codebook 1 lacks codebook.weight
quantizer.quantizers.1.out_proj.bias = ones 3 | out_proj.bias has different shapes
quantizer.quantizers.01.out_proj.bias = ones 3 | appears twice, under two numbers
decoder.block.0.snake1.alpha = - | 1 missing: decoder.block.0.snake1.alpha
decoder.conv2.bias = nan 1 | NaN ... in decoder.conv2.bias
decoder.model.{LONG}.bias = ones 1 | 1 unexpected: decoder.model.99
[higgs: model.safetensors]
fc2.weight = - | 1 missing: fc2.weight
quantizer.quantizers.0.project_out.bias = - | codebook 0 lacks project_out.bias
[higgs_first_release: model.pth]
fc_post2.bias = - | 1 missing: fc_post2.bias
quantizer.vq.layers.1._codebook.embed = - | codebook 1 lacks codebook.embed
decoder_2.model.4.bias = nan 1 | NaN ... in decoder_2.model.4.bias
decoder_2.model.4.bias = text | is a str, not a tensor
decoder_2.model.4.bias = path | nothing was executed
decoder_2.model.{LONG}.bias = ones 1 | unexpected: decoder_2.model.99
[snac: pytorch_model.bin]
quantizer.quantizers.1.out_proj.bias = - | codebook 1 lacks out_proj.bias
decoder.model.2.block.2.linear.parametrizations.weight.original1 = -
    | missing: decoder.model.2.block.2.linear.weight
decoder.model.0.bias = ones 3 | wrongly shaped: decoder.model.0.bias (3,)
decoder.model.77.bias = ones 1 | unexpected: decoder.model.77.bias
decoder.model.2.alpha = ones 1 | unexpected: decoder.model.2.alpha
decoder.model.2.block.77.bias = ones 1 | unexpected: decoder.model.2.block.77.bias
decoder.model.2.block.3.block.77.bias = ones 1 | unexpected: decoder.model.2.block.3.block.77.bias
decoder.model.1.bias = path | nothing was executed
[moss: model.safetensors]
quantizer.quantizers.1.out_proj.bias = - | codebook 1 lacks out_proj.bias
quantizer.output_proj.bias = - | missing: quantizer.output_proj.bias
decoder.0.transformer.layers.1.norm1.bias = nan 16 | NaN ... in decoder.0
decoder.0.transformer.layers.1.self_attn.in_projs.0.weight = ones 47 16 | missing: ... q_proj
decoder.1.input_proj.weight = ones 1 | unexpected: decoder.1.input_proj
decoder.{LONG}.bias = ones 1 | 1 unexpected: decoder.99
[causal_dac: codec.pth]
decoder.model.0.conv.bias = - | 1 missing: decoder.model.0.conv.bias
decoder.model.0.conv.bias = text | is a str, not a tensor
quantizer.upsample.7.0.conv.bias = ones 3 | 1 unexpected: quantizer.upsample.7.0.conv.bias
quantizer.upsample.0.1.gamma = ones 3 | upsample.0.1.gamma (3,) instead of
quantizer.post_module.layers.0.ffn_norm.weight = nan 12 | NaN or infinite values in
quantizer.post_module.layers.0.attention.wqkv.weight = ones 96 12 | q_proj.weight (48, 12) instead
quantizer.quantizer.quantizers.1.codebook.weight = ones 7 3
    | codebook.weight has different shapes in the codebooks
quantizer.semantic_quantizer.quantizers.0.out_proj.bias = - | codebook 0 lacks
[vibevoice_of_transformers: model.safetensors]
model.audio_tower.decoder.head.conv.bias = - | 1 missing: model.audio_tower.decoder.head.conv.bias
model.audio_tower.decoder.surplus.weight = ones 3
    | 1 unexpected: model.audio_tower.decoder.surplus.weight
model.latent_bias_factor = nan | infinite values in model.latent_bias_factor
model.latent_bias_factor = ones 2 | model.latent_bias_factor (2,) instead of
model.latent_scaling_factor = - | 1 missing: model.latent_scaling_factor
[voxcpm_safetensors: audiovae.safetensors]
decoder.sr_cond_model.2.scale_embed.weight = -
    | 1 missing: decoder.sr_cond_model.2.scale_embed.weight
decoder.sr_cond_model.2.scale_embed.weight = ones 3 32
    | wrongly shaped: decoder.sr_cond_model.2.scale_embed.weight (3, 32)
decoder.model.0.weight_g = -
    | missing: decoder.model.0.weight; 1 unexpected: decoder.model.0.weight_v
decoder.model.9.bias = ones 1 | unexpected: decoder.model.9.bias
decoder.model.0.bias = nan 5 | NaN ... in decoder.model.0.bias
decoder.sr_bin_boundaries = ones 2 | but sr_bin_boundaries of the ... (600,
[qwen3_tts: model.safetensors: decoder.quantizer.rvq_rest.vq.layers.1._codebook]
embedding_sum = - | quantizer.acoustic: codebook 1 lacks embed_sum
cluster_usage = ones 3 | cluster_usage has different shapes in the codebooks
[qwen3_tts: model.safetensors]
decoder.decoder.1.block.0.beta = - | 1 missing: decoder.decoder.1.block.0.beta
decoder.surplus.weight = ones 3 | 1 unexpected: decoder.surplus.weight
[qwen25_omni: model-00002-of-00003.safetensors]
token2wav.code2wav_dit_model.input_embed.proj.weight = ones 3 3
    | wrongly shaped: ... input_embed.proj.weight
[ear_tts: model.safetensors]
tts_model.audio_codec.prvq.mus_list.4 = - | codebooks: 4 codebooks in the file, expected 5
tts_model.audio_codec.prvq.mus_list.5 = ones 16 6 | codebooks: 6 codebooks in the file, expected 5
tts_model.audio_codec.prvq.mus_list.1 = ones 15 6 | entries has different shapes in the codebooks
tts_model.audio_codec.decoder.layers.0.weight = -
    | 1 missing: tts_model.audio_codec.decoder.layers.0.weight
tts_model.audio_codec.decoder.surplus = ones 3
    | 1 unexpected: tts_model.audio_codec.decoder.surplus
[lfm2_audio: model.safetensors]
lin.bias = -                          | 1 missing: lin.bias
lfm.layers.4.ffn_norm.weight = ones 3 | 1 unexpected: lfm.layers.4.ffn_norm.weight
[audex: model.safetensors]
module.head.proj.weight = -          | 1 missing: head.weight
module.lookahead_conv.bias = ones 3  | 1 unexpected: module.lookahead_conv.bias
[neucodec: model.safetensors]
acoustic_decoder.head.linear.bias = - | 1 missing: acoustic_decoder.head.linear.bias
acoustic_decoder.layers.2.mlp.fc1.weight = ones 3
    | 1 unexpected: acoustic_decoder.layers.2.mlp.fc1.weight
[xy_tokenizer: model.safetensors]
enhanced_vocos.head.out.bias = -      | 1 missing: enhanced_vocos.head.out.bias
quantizer.quantizers.2.codebook = -   | 2 codebooks in the file, expected 3
[chatterbox: s3gen.safetensors]
flow.decoder.estimator.mid_blocks.0.0.block1.block.0.weight = -
    | 1 missing: flow.decoder.estimator.mid_blocks.0.0.block1
[cosyvoice3: flow.safetensors]
spk_embed_affine_layer.bias = - | flow.safetensors: ... 1 missing: spk_embed_affine_layer.bias
input_embedding.weight = -; decoder.estimator.proj_out.bias = ones 79; decoder.extra = ones 1
    | 1 missing: input_embedding.weight; 1 unexpected: decoder.extra; 1 wrongly shaped: ... (79,)
spk_embed_affine_layer.bias = int8 80 | spk_embed_affine_layer.bias ... int8
[cosyvoice3: flow.safetensors -> flow.pt]
spk_embed_affine_layer.bias = - | flow.pt: ... 1 missing: spk_embed_affine_layer.bias
spk_embed_affine_layer.bias = ones 81 | spk_embed_affine_layer.bias (81,) instead of (80,)
spk_embed_affine_layer.weight = ones 192 80
    | spk_embed_affine_layer.weight (192, 80) instead of (80, 192)
spk_embed_affine_layer.bias = nan 80 | NaN ... spk_embed_affine_layer.bias
spk_embed_affine_layer.bias = huge 80 | infinite ... spk_embed_affine_layer.bias
spk_embed_affine_layer.bias = int64 80 | spk_embed_affine_layer.bias ... int64 ... floating
spk_embed_affine_layer.bias = complex64 80 | spk_embed_affine_layer.bias ... complex64
extra = list | 'extra' is a list
[few_convolutions: hift.pt]
ups.9.bias = ones 2 | 1 unexpected: ups.9.bias
conv_pre.weight_g = ones 32 1 1 | 'conv_pre.parametrizations.weight.original0' appears twice
[few_convolutions: hift.pt -> hift.safetensors]
conv_pre.parametrizations.weight.original0 = inf 32 1 1
    | infinite ... conv_pre.parametrizations.weight.original0
[bigvgan: bigvgan/generator.safetensors -> bigvgan/bigvgan_generator.pt]
ups.0.0.weight = -; ups.0.0.weight_v = ones 16 8 32
    | missing: ups.0.0.weight; ... unexpected: ups.0.0.weight_v
activation_post.act.beta = - | generator.pt: ... 1 missing: activation_post.act.beta
conv_pre.bias = ones 3 | conv_pre.bias (3,) instead of (16,)
conv_pre.weight = -; conv_pre.weight_g = ones 1 1 1; conv_pre.weight_v = ones 16 20 7
    | conv_pre.weight_g ... (1, 1, 1)
conv_pre.weight = -; conv_pre.weight_g = ones 16 1 1; conv_pre.weight_v = ones 16
    | conv_pre.weight_v ... (16,)
conv_pre.weight = -; conv_pre.weight_g = ones 16 1 1; conv_pre.weight_v = zeros 16 20 7
    | NaN ... conv_pre.weight
conv_pre.weight_g = ones 16 1 1; conv_pre.weight_v = ones 16 20 7 | 'conv_pre.weight' appears twice
conv_pre.weight_g = ones 16 1 1; conv_pre.parametrizations.weight.original0 = ones 16 1 1
    | 'conv_pre.weight_g' appears twice
conv_post.parametrizations.weight.original7 = ones 1 | 1 unexpected
steps = text | 'steps' is a str
steps = path | nothing was executed
conv_pre.bias = int64 16 | 'conv_pre.bias' has type torch.int64
conv_pre.bias = nan 16 | NaN ... conv_pre.bias
"""

# old text | new text | sentence
LINES = r"""
[cosyvoice2: cosyvoice2.yaml]
CausalMaskedDiffWithXvec | Xvec | flow: expected '!new:...CausalMaskedDiffWithXvec'
macaron_style: False | macaron_style: True | flow.encoder.macaron_style: True, but only False is
attention_heads: 2 | attention_heads: 3 | flow.encoder.output_size: 32 is not a multiple of 2 x 3
input_size: 32\n    out | input_size: 31\n    out | flow.input_size: 31, but only 32 is
in_channels: 320 | in_channels: 240 | flow.decoder.estimator.in_channels: 240, but
token_mel_ratio: 2 | token_mel_ratio: 4 | flow.encoder.upsample_stride: 2, but
output_type: 'mel' | output_typ: 'mel' | flow.output_typ: unknown key
dropout_rate: 0.1 | droprate: 0.1 | flow.encoder.droprate: unknown key
sigma_min: | sigma: | flow.decoder.cfm_params.content.sigma: unknown key
n_spks: 1 | speakers: 1 | flow.decoder.speakers: unknown key
dropout: 0.0 | drop: 0.0 | flow.decoder.estimator.drop: unknown key
channels: [32] | channels: [32, 32] | flow.decoder.estimator.channels: 2 entries
<chunk_size> * <token_mel_ratio> | <chunk_size> | flow.decoder.estimator.static_chunk_size: 25, but
token_frame_rate: 25 | token_frame_rate: 50 | sample_rate: 50 tokens per second of 960 samples
HiFTGenerator | CausalHiFTGenerator | hift: expected '!new:...HiFTGenerator'
solver: 'euler' | solver: 'midpoint' | flow.decoder.cfm_params.content.solver: 'midpoint', but
[cosyvoice1: cosyvoice.yaml]
output_type: 'mel' | output_typ: 'mel' | flow.output_typ: unknown key
sampling_ratios: [1, 1, 1, 1] | groups: 2 | flow.length_regulator.groups: 2, but only 1 is supported
sampling_ratios: | ratios: | flow.length_regulator.sampling_ratios: missing
channels: 80 | channels: 40 | flow.length_regulator.channels: 40, but only 80 is supported
_ratios: [1, 1, 1, 1] | _ratios: [1]\n        mode: 1 | flow.length_regulator.mode: unknown key
input_frame_rate: 50 | input_frame_rate: 48 | flow.input_frame_rate: 48 tokens per second have
macaron_style: False | macaron_style: False\n        static_chunk_size: 25
    | flow.encoder.static_chunk_size: 25, but only 0 is supported
transformer.encoder.Conformer | transformer.encoder.Transformer | flow.encoder: expected
sigma_min: | sigma: | flow.decoder.cfm_params.content.sigma: unknown key
ConditionalCFM | CausalConditionalCFM | flow.decoder: expected '!new:...ConditionalCFM'
in_channels: 320 | in_channels: 240 | flow.decoder.estimator.in_channels: 240, but only 320
channels: [32, 32] | channels: [32, 64] | flow.decoder.estimator.channels: [32, 64]; all resolutions
channels: [32, 32] | channels: [] | flow.decoder.estimator.channels: []; all resolutions
channels: [32, 32] | channels: [36, 36] | flow.decoder.estimator.channels: 36 is not a multiple of 8
dropout: 0.0 | drop: 0.0 | flow.decoder.estimator.drop: unknown key
in_channels: 80\n    base | in_channels: 100\n    base | hift.in_channels: 100 mel bands
cond_channels: 16 | cond: 16 | hift.f0_predictor.cond_channels: missing
input_frame_rate: 50 | input_frame_rate: 90 | input_frame_rate: a token has 245 samples, fewer than
sample_rate: 22050 | sample_rate: 24000 | hift.sampling_rate: 24000, but only 22050 is supported
upsample_rates: [8, 8] | upsample_rates: [8, 5] | hift: 160 samples per mel frame, but only 256
[glm4_voice: config.yaml]
block_size: 2 | block_size: 0 | flow.encoder.block_size: 0 is not between 1 and 1000
block_size: 2 | block: 2 | flow.encoder.block: unknown key
'block_rel_selfattn' | 'rel_selfattn' | flow.encoder.selfattention_layer_type: 'rel_selfattn', but
vocab_size: 16384 | vocab: 16384 | flow.vocab_size: missing
sample_rate: 22050 | sample_rate: 24000 | hift.sampling_rate: 24000, but only 22050 is supported
[stepaudio2: flow.yaml]
mlp_ratio: 4.0 | mlp_ratio: 2.0 | flow.decoder.estimator.mlp_ratio: 2.0, but only 4.0 is supported
in_channels: 320 | in_channels: 240 | flow.decoder.estimator.in_channels: 240, but only 320
depth: 1 | depth: 0 | flow.decoder.estimator.depth: 0 is not between 1 and 256
vocab_size: 6561 | vocab: 6561 | flow.vocab_size: missing
decoder_dit.DiT | decoder.UNet | flow.decoder.estimator: expected '!new:...DiT'
output_type: 'mel' | output_typ: 'mel' | flow.output_typ: unknown key
key_bias: true | key_bias: false | flow.encoder.key_bias: False, but only True is supported
up_scale_factor: 2 | up_scale_factor: 3 | flow.encoder.up_scale_factor: 3.0, but only 2.0 is
dropout_rate: 0.1\n        pos | droprate: 0.1\n        pos | flow.encoder.droprate: unknown key
inference_cfg_rate: 0.7 | inference_cfg_rate: 0.7\n        sway: 1 | flow.decoder.sway: unknown key
mlp_ratio: 4.0 | mlp_ratio: 4.0\n            rope: 1 | flow.decoder.estimator.rope: unknown key
audio_limit: 0.99 | audio_limit: 0.99\n    pad: 1 | hift.pad: unknown key
hop_len: 4 | hop_len: 4\n        window: hann | hift.istft_params.window: unknown key
num_class: 1 | num_class: 2 | hift.f0_predictor.num_class: 2, but only 1 is supported
num_class: 1 | classes: 1 | hift.f0_predictor.classes: unknown key
[cosyvoice3: cosyvoice3.yaml]
flow.CausalMaskedDiffWithDiT | flow.Xvec | flow: expected '!new:...CausalMaskedDiffWithDiT'
generator.CausalHiFTGenerator | generator.HiFT | hift: expected '!new:...CausalHiFTGenerator'
dit.DiT\n | dit.UNet\n | flow.decoder.estimator: expected '!new:...DiT'
f0_predictor.CausalConv | f0_predictor.Conv | hift.f0_predictor: expected
PreLookaheadLayer | Upsample | flow.pre_lookahead_layer: expected
CausalConditionalCFM | ConditionalCFM | flow.decoder: expected
hift: !new:cosyvoice | hift: !apply:cosyvoice | hift: expected '!new:...CausalHiFTGenerator'
!new:cosyvoice.flow.flow.CausalMaskedDiffWithDiT | "" | flow: expected
64\n        pre_lookahead_len: 3 | 64\n        pre_lookahead_len: 2 | flow.pre_lookahead_len is 3
'euler' | 'midpoint' | cfm_params.content.solver
'euler' | 1 | solver: expected str, got 1
'cosine' | 'exp' | cfm_params.content.t_scheduler: 'exp' is not one of cosine, linear
'cosine' | 'cosine'\n                times: [0, 0.6, 0.5, 1]
    | content.times[2]: 0.5 is not greater than
'cosine' | 'cosine'\n                times: [0, 0.6]
    | content.times: 2 values; the first must be 0 and
'cosine' | 'cosine'\n                n_timesteps: 0
    | content.n_timesteps: 0 is not between 1 and 100
flow: !new | flaw: !new | key 'flow' is missing
hift: !new | heft: !new | key 'hift' is missing
depth: | deepness: | flow.decoder.estimator.depth: missing
hop_len: | hop: | hift.istft_params.hop_len: missing
inference_cfg_rate: | cfg: | flow.decoder.cfm_params.content.inference_cfg_rate: missing
spk_embed_dim: 192\n | "" | 'spk_embed_dim' is missing
vocab_size: 6561 | vocab_size: '6561' | flow.vocab_size: expected int, got '6561'
vocab_size: 6561 | vocab_size: true | flow.vocab_size: expected int, got True
nsf_alpha: 0.1 | nsf_alpha: yes | hift.nsf_alpha: expected float, got True
nsf_alpha: 0.1 | nsf_alpha: .inf | hift.nsf_alpha: expected float, got inf
depth: 2 | depth: 2.5 | flow.decoder.estimator.depth: expected int, got 2.5
depth: 2 | depth: null | flow.decoder.estimator.depth: expected int, got None
depth: 2 | depth: !ref <hift> | flow.decoder.estimator.depth: expected int, got Tagged
depth: 2 | depth: 2\n            conv_layers: 4 | estimator.conv_layers: unknown key
depth: 2 | depth: 2\n            long_skip_connection: 1 | expected bool, got 1
reg_loss_type | loss_type | flow.decoder.cfm_params.content.loss_type: unknown key
output_size: 80 | output_size: 96 | flow.output_size: 96, but only 80 is supported
depth: 2 | depth: -2 | flow.decoder.estimator.depth: -2 is not between 1 and 256
_rates: [8, 5, 3] | _rates: 120 | hift.upsample_rates: expected a list
_rates: [8, 5, 3] | _rates: [8, five, 3] | hift.upsample_rates[1]: expected int, got 'five'
_rates: [8, 5, 3] | _rates: [8, 0, 3] | hift.upsample_rates[1]: 0 is not between 1 and 4096
_rates: [8, 5, 3] | _rates: [] | hift.upsample_rates: empty
" resblock_dilation_sizes: [[1, 3, 5]," | " resblock_dilation_sizes: [1," | _sizes[0]: expected a
" resblock_dilation_sizes: [[1, 3," | " resblock_dilation_sizes: [[1, 0," | _sizes[0][1]: 0 is not
\n        n_fft: 16\n        hop_len: 4 | " [16, 4]" | istft_params: expected a mapping, got list
<chunk_size> * <token_mel_ratio> | <chunk_size> / 0 | not arithmetic
cfg_rate: 0.7 | cfg_rate: -1.0 | inference_cfg_rate: -1.0 is not between 0 and 100
token_frame_rate: 25 | token_frame_rate: 0 | flow.input_frame_rate: 0.0 is not between 0.01 and 1000
dim: 64\n | dim: 72\n | flow.decoder.estimator.dim: 72 is not a multiple of 16
dim_head: 32 | dim_head: 33 | flow.decoder.estimator.dim_head: 33 is odd
mu_dim: 80 | mu_dim: 40 | flow.decoder.estimator: mel_dim, mu_dim, spk_dim
"    input_size: 80" | "    input_size: 96" | flow.input_size: 96
chunk_size: 25\n | chunk_size: 25.5\n | flow.decoder.estimator.static_chunk_size: 51 frames
upsample_kernel_sizes: [16, 11, 7] | upsample_kernel_sizes: [16, 11] | hift.upsample_kernel_sizes: 2
source_resblock_kernel_sizes: [7, 7, 11] | source_resblock_kernel_sizes: [7, 7] | 2 items, but up
source_resblock_dilation_sizes: [ | source_resblock_dilation_sizes: [[2], | 4 items, but upsample
" resblock_dilation_sizes: [" | " resblock_dilation_sizes: [[2]," | 4 items, but resblock_kernel
base_channels: 32 | base_channels: 36 | hift.base_channels: 36
n_fft: 16 | n_fft: 15 | hift.istft_params: n_fft 15 must be even
n_fft: 16 | n_fft: 6 | n_fft 6 must be
in_channels: 80\n    base | in_channels: 100\n    base | hift.in_channels: 100 mel bands
sample_rate: 24000 | sample_rate: 22050 | sample_rate: 25 tokens
token_frame_rate: 25 | token_frame_rate: 50 | sample_rate: 50 tokens
!apply:random.seed [1986] | !!python/object/apply:os.system ['true'] | nothing was executed
[codebooks: cosyvoice3.yaml]
count: 4 | count: 1 | flow.codebooks.count: 1 is below 2; for one code per token, remove codebooks
"        count: 4\n" | "" | flow.codebooks.count: missing
merge: sum | merge: mean | flow.codebooks.merge: 'mean' is not one of sum, concat
merge: sum | merge: sum\n        sizes: 4 | flow.codebooks: unknown key 'sizes'
count: 4\n        merge: sum | count: 3\n        merge: concat | flow.input_size: 80 is not a mult
[bigvgan: cosyvoice3.yaml]
type: bigvgan | type: vocos | vocoder.type: 'vocos' is not bigvgan; for HiFT, remove
"    type: bigvgan\n" | "" | vocoder.type: missing
type: bigvgan | type: bigvgan\n    path: x | vocoder: unknown key 'path'; expected type or folder
vocoder:\n    type: bigvgan\n    folder: | vocoder: | vocoder: expected a mapping
folder: bigvgan | folder: ../bigvgan | '../bigvgan' is not a folder below the model
folder: bigvgan | folder: /bigvgan | '/bigvgan' is not a folder below the model
folder: bigvgan | folder: other | other: not a BigVGAN folder, config.json cannot be read
sample_rate: 16000 | sample_rate: 24000 | BigVGAN: sampling_rate is 16000 instead of 24000
\ntoken_mel_ratio: 3 | \ntoken_mel_ratio: 1 | BigVGAN: hop_size is 160 instead of 480
\nsample_rate: 16000\n | \n | key 'sample_rate' is missing
rate: !ref <sample_rate> / 480 | rate: 33 | sample_rate: 16000 Hz gives 161.62 samples to each
rate: !ref <sample_rate> / 480 | rate: 0 | flow.input_frame_rate: 0.0 is not between 0.01 and 1000
"""

EDITS: dict[str, list[tuple[Edit, str]]] = {
    "wavtokenizer": [
        (removed("WavTokenizer_small.ckpt"), "contains none of model.safetensors"),
        (content("other.ckpt", b""), "2 files of weights, expected one: WavTokenizer_small.ckpt"),
        (content("small_v2.ckpt", b"no pickle"), "small_v2.ckpt: "),
        (content("wavtokenizer_large.yaml", "{}"), "expected one: wavtokenizer_large.yaml, wavtok"),
        (content("wavtokenizer_small.yaml", "[]"), "expected a mapping, got list"),
        (
            set_values("WavTokenizer_small.ckpt", {"state_dict": {"head.out.bias": torch.ones(3)}}),
            "wrongly shaped: head.out.bias (3,)",
        ),
    ],
    "mimi": [
        (removed("model.safetensors"), NONE_OF),
        (into("models--a/snapshots/12ab"), "its subfolder models--a/snapshots/12ab is one"),
        (content("config.json", POINTER), f"config.json{LFS}"),
        (content("config.json", PAGE), f"config.json{HTML}"),
        (content("config.json", '{"model_type"'), "config.json: not JSON: "),
        (content("config.json", "[]"), "config.json: expected an object, got list"),
        (link("config.json", "../b/1"), f"config.json is a link to ../b/1, {GONE}pull it"),
        (content("model.safetensors", POINTER), f"model.safetensors{LFS}"),
    ],
    "dac_of_descript": [
        (
            set_values("weights.pth", {"metadata.kwargs.sample_rate": torch.ones(1)}),
            "weights.pth: metadata.kwargs.sample_rate: expected int",
        ),
        (set_values("weights.pth", {"metadata": Path("/")}), "nothing was executed"),
        (set_values("weights.pth", {"metadata": ABSENT}), "metadata.kwargs: expected an object"),
        (set_values("weights.pth", {"metadata.kwargs": 3}), "metadata.kwargs: expected an object"),
        (set_values("weights.pth", {"state_dict": [1]}), "no weight is named quantizer"),
        (set_values("weights.pth", {"state_dict": {}}), "no weight is named quantizer"),
        (set_values("weights.pth", {"state_dict": {"decoder.x": 1}}), "is a int, not a tensor"),
        (content("weights.pth", b"no pickle"), "weights.pth: "),
        (
            lambda folder: (folder / "weights_44khz_8kbps_0.0.1.pth").touch(),
            "2 files of weights, expected one: weights.pth, ",
        ),
    ],
    "higgs_first_release": [
        (content("model.pth", b"no pickle"), "model.pth: "),
        (removed("model.pth"), "contains none of model.pth"),
    ],
    "mimi_of_moshi": [(weights_twice, "2 files match ... set mimi_name in config.json")],
    "snac": [
        (removed("pytorch_model.bin"), f"{NONE_OF}pytorch_model.bin"),
        (into("model"), "its subfolder model is one; use "),
    ],
    "nanocodec": [
        (content("codec.nemo", b"no archive"), "cannot be read"),
        (archive({"../model_config.yaml": YAML}), "unexpected member"),
        (archive({"/etc/passwd": YAML}), "unexpected member"),
        (archive({"model.py": YAML}), "unexpected member"),
        (archive({"a/model_config.yaml": YAML}), "unexpected member"),
        (archive({"model_weights.ckpt": b""}), "contains no model_config.yaml"),
        (
            archive({"model_config.yaml": YAML, "./model_config.yaml": YAML}),
            "appears twice",
        ),
        (
            archive({"model_config.yaml": YAML, "model_weights.ckpt": CODE}),
            "nothing was executed",
        ),
        (member(tarfile.SYMTYPE), "not a regular file"),
        (member(tarfile.LNKTYPE), "not a regular file"),
        (member(tarfile.FIFOTYPE), "not a regular file"),
        (member(tarfile.REGTYPE, 5 << 30), "at most 1048576 are allowed"),
        (content("other.nemo", b""), "2 files of weights, expected one: codec.nemo, other.nemo"),
    ],
    "voxcpm": [
        (set_values("audiovae.pth", {"state_dict": [1]}), "no weight is named decoder.*"),
        (
            set_values("config.json", {"audio_vae_config.sr_bin_boundaries": [1] * 65}),
            "sr_bin_boundaries: 65 items; at most 64",
        ),
        (
            set_values(
                "config.json",
                {
                    "audio_vae_config": {
                        "sample_rate": 1,
                        "decoder_rates": [256],
                        "encoder_rates": [256],
                    },
                    "architecture": "voxcpm",
                },
            ),
            "frames per second: ... is not between 0.01 and",
        ),
    ],
    "chatterbox": [
        (
            set_weights("s3gen.safetensors", {"flow.encoder.after_norm.weight": ABSENT}),
            "'flow.encoder.after_norm.weight' is missing",
        )
    ],
    "cosyvoice3": [
        (content("cosyvoice3.yaml", POINTER), f"cosyvoice3.yaml{LFS}"),
        (content("cosyvoice3.yaml", PAGE), f"cosyvoice3.yaml{HTML}"),
        (link("cosyvoice3.yaml", "../b/1"), f"cosyvoice3.yaml is a link to ../b/1, {GONE}"),
        (link("flow.safetensors", "../b/1"), f"a link to ../b/1, {GONE}download the file"),
        (
            content("cosyvoice2.yaml", "a: 1"),
            "contains cosyvoice2.yaml and cosyvoice3.yaml, which belong to different families",
        ),
        (into("snapshots/12ab"), "its subfolder snapshots/12ab is one; use "),
        (removed("cosyvoice3.yaml"), "not a model folder; it contains none of"),
        (removed("hift.safetensors"), "contains none of hift.safetensors, hift.pt"),
        (removed("flow.safetensors"), "contains none of flow.safetensors, flow.pt"),
        (removed("flow.safetensors", "hift.safetensors"), "contains none of flow.safetensors"),
        (content("flow.safetensors", POINTER), f"flow.safetensors{LFS}"),
        (content("flow.safetensors", b""), "flow.safetensors: the file is empty; download it"),
        (content("flow.safetensors", b"\xff" * 64), "flow.safetensors: cannot be read"),
        (cut("flow.safetensors", 0.9), "flow.safetensors: cannot be read"),
        (cut("flow.safetensors", 0.9, "flow.pt"), "flow.pt: cannot be read"),
        (pickled(lambda weights: {"state_dict": weights}), "'state_dict' is a dict, not a tensor"),
        (pickled(lambda weights: list(weights.values())), "flow.pt: ... state dict ... list"),
        (pickled(lambda weights: {}), "missing: ... input_embedding.weight ... and 42 more"),
        (pickled(lambda weights: tiny_weights("hift")), "flow.pt: ... missing: ... unexpected:"),
        (noise(RAND_NOISE, torch.zeros(1, 40, 50)), f"{RAND_NOISE} ... (1, 40, 50) ... 80"),
        (noise(RAND_NOISE, torch.zeros(80, 50)), f"{RAND_NOISE} ... (80, 50)"),
        (noise(RAND_NOISE, torch.full((1, 80, 4), torch.nan)), f"NaN ... {RAND_NOISE}"),
        (noise(SINES, torch.zeros(1, 480, 8)), f"{SINES} ... (1, 480, 8) ... 9"),
        (noise(SINES, torch.zeros(1, 480, 9).double()), f"{SINES} ... float64 ... float32"),
        (content("noise.safetensors", b""), "noise.safetensors: the file is empty"),
        (content("noise.safetensors", b"not tensors"), "noise.safetensors: cannot be read"),
    ],
    "cosyvoice1": [
        (removed("hift.pt"), "contains none of hift.safetensors, hift.pt"),
        (removed("flow.pt"), "contains none of flow.safetensors, flow.pt"),
        (cut("flow.pt", 0.9), "flow.pt: cannot be read"),
        (
            content("cosyvoice2.yaml", "a: 1"),
            "contains cosyvoice.yaml and cosyvoice2.yaml, which belong to different families",
        ),
    ],
    "few_convolutions": [
        (content("hift.pt", PAGE), f"hift.pt{HTML}"),
        (content("hift.pt", b""), "hift.pt: the file is empty; download it again"),
        (content("hift.pt", POINTER), f"hift.pt{LFS}"),
        (cut("hift.pt", 0.01), "hift.pt: "),
        (cut("hift.pt", 0.01, "hift.safetensors"), "hift.safetensors: cannot be read"),
        (changed_document("hift.pt", lambda weights: torch.ones(3)), "state dict ... Tensor"),
    ],
    "bigvgan": [
        *(
            (content("bigvgan/config.json", text), f"bigvgan/config.json: {sentence}")
            for text, sentence in (
                ("", "not JSON"),
                ("[]", "expected an object"),
                ("\0", "not JSON"),
                ("[" * 100_000, "not JSON"),
                (" " * ((1 << 20) + 1), "larger than 1048576 bytes"),
                ('{"num_mels": 80, "num_mels": 81}', "key 'num_mels' appears more than once"),
            )
        ),
        (removed("bigvgan/config.json"), "not a BigVGAN folder, config.json cannot be read"),
        (
            removed("bigvgan/generator.safetensors"),
            "none of generator.safetensors, bigvgan_generator.pt, generator.pt",
        ),
        (content("bigvgan/generator.safetensors", b""), "generator.safetensors: the file is empty"),
        (content("bigvgan/generator.safetensors", POINTER), f"generator.safetensors{LFS}"),
        (content("bigvgan/generator.safetensors", b"\xff" * 64), "generator.safetensors: cannot"),
    ],
}
REFUSALS = [
    *values(VALUES),
    *weights(WEIGHTS),
    *lines(LINES),
    *(
        Refusal(family, edit, sentence, str(number))
        for family, rows in EDITS.items()
        for number, (edit, sentence) in enumerate(rows)
    ),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a family without any edit. It is checked once."""

    @cache
    def folder(family: str) -> Path:
        written = write_folder(family, tmp_path_factory.mktemp(family))
        check_folder(written)
        return written

    return folder


def edited(refusal: Refusal, good: Callable[[str], Path], tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(good(refusal.family), tmp_path / "model"))
    refusal.edit(folder)
    return folder


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_a_folder_that_is_refused(
    refusal: Refusal, good: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = edited(refusal, good, tmp_path)
    with pytest.raises(refusal.error) as refused:
        check_folder(folder)
    message = str(refused.value)
    assert message.startswith(str(folder))
    paths = re.findall(rf"{folder}[^:;, ]*", message)
    assert len(paths) == len(set(paths)), message
    parts = map(re.escape, refusal.sentence.split(" ... "))
    assert re.search(".*".join(parts), message), message
    assert "\n" not in message
    assert len(message) < 1500 + len(refusal.name)


@pytest.mark.parametrize("refusal", {row.family: row for row in REFUSALS}.values(), ids=str)
def test_a_load_refuses_as_the_check_does(
    refusal: Refusal, good: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = edited(refusal, good, tmp_path)
    with pytest.raises(Token2WavError) as checked:
        check_folder(folder)
    with pytest.raises(Token2WavError) as loaded:
        Token2Wav.load(folder, runtime=RuntimeConfig(device="cpu"))
    assert str(loaded.value) == str(checked.value)


@pytest.mark.parametrize(
    ("name", "near"),
    [("mimmi", "mimi"), ("CosyVoice3", "fun-cosyvoice3-0.5b"), ("qwen3-tt", "qwen3-tts")],
)
def test_a_name_that_is_nearly_an_alias(name: str, near: str) -> None:
    with pytest.raises(Token2WavError, match=f"^{name}: no such model folder; did you mean {near}"):
        check_folder(Path(name))


def test_a_file_is_no_model_folder() -> None:
    with pytest.raises(ConfigError, match="no such model folder"):
        check_folder(TINY / "cosyvoice3.yaml")
