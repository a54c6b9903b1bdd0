"""Model of the library: loads a model folder, opens streams, and synthesizes utterances."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from token2wav.assembly import assemble, check_runtime
from token2wav.config import RuntimeConfig, StreamConfig, config_hash
from token2wav.config.arrays import float_array
from token2wav.config.model_config import ModelConfig, StageName
from token2wav.errors import ConfigError, InputError, LimitError
from token2wav.execution.cuda_facts import device_facts
from token2wav.hub import model_folder
from token2wav.published.registry import family_name, read_config
from token2wav.serving.audio_mark import imported_mark, load_mark
from token2wav.serving.hops import HopSchedule
from token2wav.serving.options import DEFAULTS, UtteranceOptions
from token2wav.serving.pipeline import Pipeline
from token2wav.serving.stream import Stream
from token2wav.stages.stage import Stages
from token2wav.voice import Voice, check_steps, voice_for

log = logging.getLogger(__name__)

_STREAMS = 64  # default number of open streams that memory is allocated for


class Token2Wav:
    """Loaded model, which opens streams and synthesizes whole utterances.

    Example:
        >>> model = Token2Wav.load("path/to/Fun-CosyVoice3-0.5B")
        >>> voice = Voice.load("voice.safetensors")
        >>> audio = model.synthesize(tokens, voice)  # float32 (samples,)

    `Token2Wav.load` creates a model. `print(model)` shows a summary of three lines: model, device
    and backend.

    Attributes:
        config: sizes and rates of the model.
        pipeline: pipeline of stages, which computes the chunks of all streams.
        name: model folder and family, for the summary.
    """

    def __init__(
        self, config: ModelConfig, stages: Stages, stream: StreamConfig, name: str = "unnamed"
    ) -> None:
        self.config = config
        self.summary = stages.summary
        self.name = name
        speaks = len(stages.by_name) == len(config.stages)  # a stage of the ensemble does not
        mark = load_mark(stream.mark) if stream.mark is not None and speaks else None
        self.pipeline = Pipeline(config, stages.by_name, stream, self.summary.device, mark)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        stream: StreamConfig | None = None,
        runtime: RuntimeConfig | None = None,
        streams: int = _STREAMS,
        stages: Sequence[StageName] = (),
    ) -> Token2Wav:
        """Loads a model folder of any family, as its authors published it.

        Args:
            folder: path of the model folder; or a name of a model on the Hugging Face Hub, such as
                `org/name` or `org/name@revision`, which is pulled first.
            stream: settings of streams; None for the defaults.
            runtime: settings of device, backend and memory; None for the defaults.
            streams: number of streams that will be open at the same time. Memory for their states
                is allocated when the model is loaded, except for states in place (`StateStore`).
                Further streams allocate more memory.
            stages: stages to load; by default all. A model with a part of its stages has no
                streams: a process of the ensemble uses the stage itself.

        Raises:
            ConfigError: the configuration file of the folder, or a setting, cannot be used; or the
                default dtype of torch is not float32, also when the model is used later.
            HubError: the model of a name cannot be pulled.
            CheckpointError: weights are missing, unreadable, or do not fit the configuration.
        """
        folder = model_folder(folder)
        stream, runtime = stream or StreamConfig(), runtime or RuntimeConfig()
        config = config_under(folder, stream)
        made = assemble(folder, config, stream, runtime, streams, stages)
        log.info(
            "configuration %s of %s: %s %s", config_hash(config, stream), folder, config, stream
        )
        return cls(config, made, stream, f"{folder} ({family_name(config)})")

    def __str__(self) -> str:
        device = torch.device(self.summary.device)
        facts = device_facts(device) if device.type == "cuda" else []
        rates = (
            f"{self.config.token_frame_rate:g} tokens and {self.config.sample_rate} samples "
            f"per second"
        )
        return "\n".join(
            [
                f"model    {self.name}, {rates}",
                f"device   {', '.join([str(device), *facts])}",
                f"backend  {self.summary.name}, {self.summary.precision}",
            ]
        )

    def probe(self) -> None:
        """Synthesizes a short utterance, to find a broken backend before the first request. Raises
        BackendError if the backend fails, or yields NaN or infinite audio; and ConfigError if the
        cache is too small for a stream.
        """
        config = self.config
        silent = Voice(
            config.tokens.zeros(0),
            np.zeros((0, config.mel_bands), np.float32),
            np.ones(config.speaker_size, np.float32),
        )
        tokens = config.tokens.draw(2 * config.block_tokens, np.random.default_rng(0))
        try:
            self.synthesize(tokens, silent if config.takes_voice else None)
        except LimitError as error:  # no other stream is open
            usage = self.pipeline.usage()
            raise ConfigError(
                f"runtime.cache_mib: the cache has room for {usage.capacity} of the pages of "
                f"{usage.page_bytes / 2**20:.1f} MiB, and a stream needs more; set a larger value, "
                "or free memory"
            ) from error

    def stream(
        self,
        voice: Voice | None = None,
        options: UtteranceOptions = DEFAULTS,
    ) -> Stream:
        """Opens a stream.

        Args:
            voice: prompt and speaker; None for a model without voices, such as a codec decoder.
            options: options of the utterance, such as `UtteranceOptions(steps=5)`.

        Raises:
            InputError: the voice or an option does not fit the model.
            LimitError: the cache has no room for another stream.
            BackendError: the backend, or the plugin of the mark, failed.
        """
        return Stream(self.pipeline, voice_for(self.config, voice), options)

    def synthesize(
        self,
        tokens: ArrayLike,
        voice: Voice | None = None,
        options: UtteranceOptions = DEFAULTS,
    ) -> NDArray[Any]:
        """Synthesizes a whole utterance.

        The samples are those of a stream that gets all tokens in one call, so no provisional chunks
        (audio of incomplete attention blocks) are computed. For a model with flow and vocoder they
        equal `vocode(mel(tokens, voice))` up to float rounding, with two exceptions. The audio of
        StreamFlow depends on the ends of chunks (`ModelConfig.fixed_hops`), and `mel` computes one
        chunk. With `StreamConfig.lookahead_frames` above 0, a vocoder extrapolates the last
        samples of each chunk. At another speed than 1, the mel is first interpolated in time, as by
        `torch.nn.functional.interpolate` with `scale_factor=1 / speed, mode="linear"`.

        Args:
            tokens: (n,) integers, n >= 1, or (n, codebooks); or (n, size) numbers for a model that
                takes latents.
            voice: as for `stream`.
            options: as for `stream`.

        Returns:
            (samples_per_token * n - missing_samples,) float32 at speed 1, minus the leading silence
            that `StreamConfig.trim_silence_ms` removes. `ModelConfig` has both numbers. A model
            with several channels has a second dimension for them. `options.audio_format` sets
            another type, and another sample rate.

        Raises:
            InputError: a token, the voice or an option does not fit the model, or there are no
                tokens.
            LimitError: the cache has no room for another stream.
        """
        with self.stream(voice, options) as stream:
            chunks = stream.finish(tokens)
        return np.concatenate([chunk.audio for chunk in chunks])

    def mel(
        self, tokens: ArrayLike, voice: Voice, streaming: bool = True, *, steps: int = 0
    ) -> NDArray[np.float32]:
        """Computes the mel of a whole utterance at once, as the reference for streams.

        Args:
            tokens: (n,) integers, n >= 1, or (n, codebooks).
            streaming: True for the attention mask of streams, in which a frame attends to its own
                block and to earlier blocks; False for full attention.
            steps: number of ODE steps, one of `StreamConfig.steps`; 0 for the default.

        Returns:
            (bands, token_mel_ratio * n) float32; (80, 2 * n) for CosyVoice3.

        Raises:
            InputError: a token or the voice does not fit the model, there are no tokens, or the
                number of steps is not allowed.
            ConfigError: the model has no flow stage.
        """
        flow = self.pipeline.flow
        voice.check(self.config)
        array = self.config.tokens.checked(tokens)
        if not array.size:
            raise InputError("tokens", "empty; at least 1 is needed")
        check_steps(steps, self.pipeline.steps)
        with self.pipeline.running():
            return flow.whole(array, voice, streaming=streaming, steps=steps).cpu().numpy()

    def vocode(self, mel: ArrayLike) -> NDArray[np.float32]:
        """Computes the audio of a whole mel, without a mark.

        Args:
            mel: (bands, frames) log-mel with at least 1 frame; 80 bands for CosyVoice3.

        Returns:
            (samples,) float32; 480 samples per frame for CosyVoice3.

        Raises:
            InputError: the mel has another shape, no frames, or a value that is not finite.
            ConfigError: the model has no vocoder stage.
        """
        vocoder, bands = self.pipeline.vocoder, self.config.mel_bands
        array = float_array("mel", mel, 2)
        if array.shape[0] != bands or not array.shape[1]:
            raise InputError(
                "mel", f"shape {array.shape}, expected ({bands}, frames) with at least 1 frame"
            )
        with self.pipeline.running():
            return vocoder.whole(torch.from_numpy(array)).cpu().numpy()


def check_settings(folder: Path, stream: StreamConfig, runtime: RuntimeConfig) -> None:
    """Raises ConfigError if a setting does not fit the model, or this machine lacks the device, the
    backend or the memory. Loads no weights.
    """
    check_runtime(folder, config_under(folder, stream), stream, runtime)


def config_under(folder: Path, stream: StreamConfig) -> ModelConfig:
    """Reads the configuration of a model folder, and applies the settings of streams. Raises
    ConfigError if a setting does not fit the model.
    """
    config = read_config(folder).with_stream_settings(stream)
    config.check(stream)
    HopSchedule.of(stream, config)
    if stream.mark is not None:
        imported_mark(stream.mark)
    return config
