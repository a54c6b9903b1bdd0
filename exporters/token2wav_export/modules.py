"""Modules of the exported graphs: torch modules in both precisions, with random sample inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import nn

from token2wav.assembly import Exportable
from token2wav.config.model_config import ModelConfig, StageName
from token2wav.config.token_format import NO_CODE
from token2wav.exported.run import (
    AUDIO,
    NEW,
    NOISE_FACTOR,
    PAST,
    exported_states,
    signals_of,
)
from token2wav.layers.streaming import Streaming, StreamStep
from token2wav.networks.dit import DiT
from token2wav.networks.estimator import MODULATION, PRESENT, ROPE, CachedStep
from token2wav.networks.hift import HiFT
from token2wav.networks.masks import attention_bias
from token2wav.networks.waveform_network import WaveformNetwork
from token2wav.published.artifacts import GraphName, Precision, stage_of
from token2wav_export.signatures import Signature, Sizes, TensorSpec

# Streams run for at least this number of frames before their states are used as inputs. No vocoder
# holds back more frames.
_STARTED_FRAMES = 50
# Scale of a random excitation, about the scale of the harmonic source. A far louder excitation
# would only be clipped.
_EXCITATION = 0.1


Tensors = dict[str, torch.Tensor]  # inputs or outputs of a graph, by name


class PublicEstimator(nn.Module):
    """Estimator without state, as in the public code. It recomputes everything at each call.

    Args:
        streaming: whether a frame attends no further than the end of its own block.
    """

    def __init__(self, estimator: DiT, streaming: bool) -> None:
        super().__init__()
        self.estimator = estimator
        self.streaming = streaming
        # The frequencies are replaced by a constant, because an exported graph would compute them
        # with an error in the last digit. This error grows to 1e-5 in the output.
        frequencies = estimator.time_embed.frequencies(torch.device("cpu"))
        estimator.time_embed.frequencies = lambda device: frequencies  # type: ignore[method-assign]

    def forward(self, inputs: Tensors) -> Tensors:
        return {"estimator_out": self.estimator(**inputs, streaming=self.streaming)}


class _Traced(StreamStep):
    """Step that returns new states separately and does not overwrite its input states."""

    @cached_property
    def new_states(self) -> dict[nn.Module, torch.Tensor]:
        return {}

    def save_state(self, layer: Streaming, value: torch.Tensor) -> None:
        self.new_states[layer] = value


class Vocoder(nn.Module):
    """Module of a vocoder or of a codec decoder for export: calls `HiFT.decode`, or the method
    `forward` of another network.

    Args:
        whole: True for whole sequences, False for pieces of streams with states.
    """

    def __init__(
        self, vocoder: WaveformNetwork, config: ModelConfig, stage: StageName, *, whole: bool
    ) -> None:
        super().__init__()
        self.vocoder = vocoder
        self.signals = signals_of(stage, vocoder)
        self._tokens = config.tokens
        self._network: Callable[..., torch.Tensor] = (
            vocoder.decode if isinstance(vocoder, HiFT) else vocoder.forward
        )
        self.specs = {} if whole else exported_states(vocoder)

    def forward(self, inputs: Tensors) -> Tensors:
        """Computes the audio of tokens; or of mel and, for HiFT, of its excitation.

        For pieces of streams, the inputs contain the earlier states, and the outputs the new
        states.
        """
        signals = [inputs[name] for name in self.signals]
        if not self.specs:
            return {AUDIO: self._network(*signals)}
        # Outside of an export, attention layers write into their states.
        state = {layer: inputs[f"{PAST}{spec.name}"].clone() for layer, spec in self.specs.items()}
        step = _Traced(state, noise_factor=inputs.get(NOISE_FACTOR))
        audio = self._network(*signals, step)
        return {
            AUDIO: audio,
            **{
                f"{NEW}{spec.name}": step.new_states.get(layer, state[layer])
                for layer, spec in self.specs.items()
            },
        }

    def draw_codes(self, tokens: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draws codes of the shape (B, codebooks, T) of `tokens`, which are returned if the model
        takes latents. The last row has only the first codebook, if the model allows that.
        """
        if self._tokens.are_latents:
            return tokens
        sizes = self._tokens.codebook_sizes
        codes = torch.randint(max(sizes), tokens.shape, generator=generator).to(tokens.dtype)
        codes %= torch.tensor(sizes)[:, None]
        if self._tokens.fewer_codebooks:
            codes[-1, 1:] = NO_CODE
        return codes

    @torch.inference_mode()
    def started(self, *signals: torch.Tensor) -> Tensors:
        """Returns the states after streams have begun with these signals, as inputs by name.

        The streams end where a step may end.
        """
        rows, length = len(signals[0]), signals[0].shape[2]
        vocoder = self.vocoder
        frames = length - (length - vocoder.frames_past_window) % vocoder.window_frames
        # A signal may have several positions for each frame.
        signals = tuple(signal[:, :, : signal.shape[2] // length * frames] for signal in signals)
        state = {
            layer: torch.zeros(rows, *spec.shape, dtype=spec.dtype)
            for layer, spec in self.specs.items()
        }
        self._network(*signals, StreamStep(state, first=True, frames=frames))
        return {f"{PAST}{spec.name}": state[layer] for layer, spec in self.specs.items()}


def load_module(graph: GraphName, precision: Precision, model: Exportable) -> nn.Module:
    """Loads the module of a graph on the CPU. The module maps inputs by name to outputs by name,
    with the names in the signature of the graph. Raises CheckpointError if the weights cannot be
    used.
    """
    if (stage := stage_of(graph)) != "flow":
        vocoder = model.load(stage)
        if precision == "float16":
            halve_convolutions(vocoder)
        return Vocoder(vocoder, model.config, stage, whole=graph == "vocoder-whole").eval()
    estimator = model.load("flow").estimator
    if precision == "float16":
        estimator.halve()
    if graph == "step":
        return CachedStep(estimator).eval()
    return PublicEstimator(estimator, streaming=graph == "estimator-streaming").eval()


def halve_convolutions(vocoder: WaveformNetwork) -> None:
    """Converts the convolutions of the network to float16, except for the F0 predictor.

    All other layers keep their dtype, above all the layers that compute phases.
    """
    for name, module in vocoder.named_modules():
        if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)) and not name.startswith(
            "f0_predictor."
        ):
            module.half()  # these layers convert their inputs and outputs themselves


def run_module(module: nn.Module, inputs: Tensors) -> Tensors:
    """Runs a float32 module. float16 inputs are converted to float32 first."""
    with torch.inference_mode():
        return module(
            {name: x.float() if x.dtype == torch.float16 else x for name, x in inputs.items()}
        )


def sample_inputs(module: nn.Module, signature: Signature, sizes: Sizes, seed: int = 0) -> Tensors:
    """Draws random but realistic inputs.

    Rows have different lengths and pasts. Rotary angles, modulation and the states of a vocoder are
    computed by the network. A vocoder that attends to windows gets whole windows: `sizes` are
    rounded up.
    """
    generator = torch.Generator().manual_seed(seed)
    if isinstance(module, Vocoder):
        window = module.vocoder.window_frames
        sizes = {**sizes, "frames": -(-sizes["frames"] // window) * window}

    def normal(spec: TensorSpec) -> torch.Tensor:
        return torch.randn(spec.of(sizes), generator=generator).to(getattr(torch, spec.dtype))

    inputs = {spec.name: normal(spec) for spec in signature.inputs}
    rows, frames = sizes["rows"], sizes["frames"]
    valid = torch.randint(1, frames + 1, (rows,), generator=generator)  # (rows,)
    valid[0] = frames
    query = torch.arange(frames)
    if isinstance(module, CachedStep):
        past, estimator = sizes["past"], module.estimator
        # Valid past frames of each row.
        begin = torch.randint(0, past + 1, (rows,), generator=generator)
        begin[0] = past
        key = torch.arange(past + frames)
        # (rows, keys)
        key_mask = torch.where(key < past, key < begin[:, None], key - past < valid[:, None])
        inputs["bias"] = attention_bias(key_mask[:, None, None, :].expand(-1, 1, frames, -1))
        inputs |= zip(ROPE, estimator.rope(begin[:, None] + query), strict=False)
        inputs |= zip(
            MODULATION, estimator.modulation(*torch.rand(2, 1, generator=generator)), strict=False
        )
        inputs["frames"] = valid
        if PRESENT in inputs:
            inputs[PRESENT] = (query >= frames - valid[:, None])[:, None].float()
    elif isinstance(module, PublicEstimator):
        inputs["mask"] = (query < valid[:, None])[:, None].float()
        inputs["t"] = torch.rand(rows, generator=generator)
    elif isinstance(module, Vocoder):
        if "source" in inputs:
            inputs["source"] *= _EXCITATION
        if NOISE_FACTOR in inputs:
            inputs[NOISE_FACTOR] = torch.arange(rows) % 2
        if "tokens" in inputs:
            inputs["tokens"] = module.draw_codes(inputs["tokens"], generator)
        if module.specs:
            signals = [inputs[name].repeat(1, 1, _STARTED_FRAMES) for name in module.signals]
            inputs |= module.started(*signals)
    return inputs
