"""Chatterbox: its folder with S3Gen. The flow is a conformer and a U-Net, in Chatterbox Turbo with
a MeanFlow; the vocoder is the HiFT of earlier generations.

No published file has the sizes of S3Gen, only the public code. They are therefore read from the
shapes of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from token2wav.config import StreamConfig
from token2wav.config.model_config import StageName
from token2wav.errors import CheckpointError, ConfigError, one_line
from token2wav.families.cosyvoice2 import CosyVoice2Config, FlowConfig
from token2wav.published.sizes import ConformerConfig, HiFTConfig, ScheduleConfig, UNetConfig

# Names of files with the weights, in order of preference. The file of Chatterbox Turbo, the
# distilled model, comes first. In a folder of Turbo it lies beside the voices and tokenizers of the
# other model.
MEAN_FLOW_FILES = ("s3gen_meanflow.safetensors",)
FILES = (*MEAN_FLOW_FILES, "s3gen.safetensors", "s3gen.pt")
DOWNLOADS = ("|".join(FILES), "conds.pt")

_TOKEN_RATE, _LOOKAHEAD = 25, 3
_STEPS, _MEAN_FLOW_STEPS = 10, 2
_GUIDANCE = 0.7
_WHOLE_TOKENS = 1_000_000  # a hop that no utterance completes
_WINDOW_LOOKAHEAD = 25
_HEADS = 8  # heads of every attention layer
_PUBLISHED = (
    ConformerConfig(512, _HEADS, 2048, 6, 4),
    UNetConfig(256, _HEADS, 64, 12, 4),
    HiFTConfig(),
)

# weights that only a mean flow has, which join the times of start and end of a step
_MIXER = "flow.decoder.estimator.time_embed_mixer.weight"

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class ChatterboxConfig(CosyVoice2Config):
    """Configuration of a Chatterbox model."""

    flow: FlowConfig[UNetConfig]
    mean_flow: bool  # whether it is a Turbo model: few ODE steps of equal length, without guidance
    file: str  # name of the file of the weights

    def hops(self, stream: StreamConfig) -> tuple[int, int]:
        """Returns the first and the longest hop, in tokens.

        `stream.reference` repeats the public code, which computes only whole utterances. If
        `stream.max_hop_tokens` is set too, the public code is applied to windows of that hop, and
        audio is streamed.
        """
        hop = stream.max_hop_tokens or _WHOLE_TOKENS
        return (hop, hop) if stream.reference else super().hops(stream)

    def with_stream_settings(self, stream: StreamConfig) -> ChatterboxConfig:
        """Sets the look-ahead of the windows of `stream.reference`.

        It is far longer than the look-ahead layer needs, because under full attention frames depend
        on all later tokens of their window.
        """
        super().with_stream_settings(stream)
        return replace(self, lookahead_tokens=_WINDOW_LOOKAHEAD) if stream.reference else self

    def weights_names(self, stage: StageName) -> tuple[str, ...]:
        return (self.file,)


def read(folder: Path) -> ChatterboxConfig:
    """Reads the sizes of the model in a folder: from the shapes in `s3gen_meanflow.safetensors` or
    `s3gen.safetensors`. For `s3gen.pt` returns the published sizes. A mean flow is recognised by
    its weights, because Chatterbox Flash has one in `s3gen.safetensors`.
    """
    file = next(name for name in FILES if (folder / name).is_file())
    path = folder / file
    # The shapes in a pickle (`.pt`) cannot be read without torch.
    pickled = path.suffix == ".pt"
    shapes = {} if pickled else _shapes(path)
    encoder, estimator, hift = _PUBLISHED if pickled else _counted(shapes, path)
    mean_flow = file in MEAN_FLOW_FILES or _MIXER in shapes
    flow = FlowConfig(
        vocab_size=6561,
        spk_embed_dim=192,
        mel_bands=hift.in_channels,
        pre_lookahead_len=_LOOKAHEAD,
        inference_cfg_rate=0.0 if mean_flow else _GUIDANCE,
        encoder=encoder,
        estimator=estimator,
        n_timesteps=_MEAN_FLOW_STEPS if mean_flow else _STEPS,
    )
    schedule = ScheduleConfig("linear" if mean_flow else "cosine")
    return ChatterboxConfig.of(
        flow, hift, _TOKEN_RATE, schedule=schedule, mean_flow=mean_flow, file=file
    )


def _shapes(path: Path) -> Shapes:
    """Reads the shapes alone: no weight is loaded, and torch is not needed."""
    try:
        with safe_open(path, framework="np") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {one_line(error)[:200]}") from error


def _counted(shapes: Shapes, path: Path) -> tuple[ConformerConfig, UNetConfig, HiFTConfig]:
    def size(name: str, axis: int = 0) -> int:
        if name not in shapes:
            raise ConfigError(f"{path}: '{name}' is missing; a size of S3Gen is read from it")
        if len(shapes[name]) <= axis:
            raise ConfigError(
                f"{path}: '{name}' has the shape {shapes[name]}, which lacks dimension "
                f"{axis + 1}; a size of S3Gen is read from it"
            )
        return shapes[name][axis]

    def layers(start: str) -> int:
        """Counts modules by the numbers that follow the start of their names."""
        return len(
            {name[len(start) :].partition(".")[0] for name in shapes if name.startswith(start)}
        )

    encoder, estimator = "flow.encoder.", "flow.decoder.estimator."
    attention = f"{estimator}down_blocks.0.1.0.attn1."
    widths = ConformerConfig(
        size(f"{encoder}after_norm.weight"),
        size(f"{encoder}encoders.0.self_attn.pos_bias_u"),
        size(f"{encoder}encoders.0.feed_forward.w_1.weight"),
        layers(f"{encoder}encoders."),
        layers(f"{encoder}up_encoders."),
    )
    unet = UNetConfig(
        size(f"{estimator}final_proj.weight", 1),
        _HEADS,
        size(f"{attention}to_q.weight") // _HEADS,
        layers(f"{estimator}mid_blocks."),
        layers(f"{estimator}down_blocks.0.1."),
    )
    vocoder = "mel2wav."
    base = size(f"{vocoder}conv_pre.bias")
    f0_channels = size(f"{vocoder}f0_predictor.classifier.weight", 1)
    return widths, unet, HiFTConfig(base_channels=base, f0_channels=f0_channels)
