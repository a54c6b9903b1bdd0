"""Model of the library: it is loaded from a folder, opens streams and synthesises whole utterances."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from token2wav.config import RuntimeConfig, StreamConfig, config_hash
from token2wav.errors import InputError
from token2wav.execution.assemble import assemble, check_runtime
from token2wav.execution.stages import Stages
from token2wav.families import family_of, read_config
from token2wav.model_config import ModelConfig
from token2wav.serving.chunking import HopSchedule, checked_tokens
from token2wav.serving.pipeline import Pipeline
from token2wav.serving.stream import Stream
from token2wav.voice import Voice, check_steps, float_array

log = logging.getLogger(__name__)


class Token2Wav:
    """Loaded model, which opens streams and synthesises whole utterances. `Token2Wav.load` makes
    one.

    `print(model)` shows a summary of three lines: model, device and backend.

    Attributes:
        config: sizes and rates of the model.
        pipeline: runs the chunks of all streams.
        engine: backend, precision and device of the networks.
        name: model folder and family, for the summary.
    """

    def __init__(
        self, config: ModelConfig, stages: Stages, stream: StreamConfig, name: str = "unnamed"
    ) -> None:
        self.config = config
        self.engine = stages.summary
        self.name = name
        self.pipeline = Pipeline(config, stages.by_name, stream, self.engine.device)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        stream: StreamConfig | None = None,
        runtime: RuntimeConfig | None = None,
    ) -> Token2Wav:
        """Loads a model folder of any family, as its authors published it.

        Args:
            folder: path of the model folder.
            stream: settings of chunks and their masks.
            runtime: settings of device and engine.

        Raises:
            ConfigError: the folder's YAML or a setting cannot be used.
            CheckpointError: weights are missing, unreadable, or do not fit the YAML.
        """
        folder, stream, runtime = Path(folder), stream or StreamConfig(), runtime or RuntimeConfig()
        config = _config_under(folder, stream)
        stages = assemble(folder, config, stream, runtime)
        family = family_of(folder).__name__.rpartition(".")[2]
        log.info(
            "configuration %s of %s: %s %s", config_hash(config, stream), folder, config, stream
        )
        return cls(config, stages, stream, f"{folder} ({family})")

    def __str__(self) -> str:
        device = torch.device(self.engine.device)
        gpu = f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
        rates = f"{self.config.token_frame_rate:g} tokens and {self.config.sample_rate} samples per second"
        return "\n".join(
            [
                f"model    {self.name}, {rates}",
                f"device   {device}{gpu}",
                f"backend  {self.engine.name}, {self.engine.precision}",
            ]
        )

    def probe(self) -> None:
        """Speaks for a moment, so that an engine that does not work is found before anybody
        listens.

        Raises:
            EngineError: it fails, or gives NaN or infinite numbers.
        """
        config = self.config
        silent = Voice(
            np.zeros((0, *config.token_shape), np.int32),
            np.zeros((0, config.mel_bands), np.float32),
            np.ones(config.speaker_size, np.float32),
        )
        counted = np.arange(2 * config.block_tokens) % config.vocab_size
        tokens = np.broadcast_to(counted, (*config.token_shape[::-1], len(counted))).T
        self.synthesize(tokens, silent)

    def stream(self, voice: Voice, *, steps: int = 0) -> Stream:
        """Opens a stream.

        Args:
            voice: prompt and speaker.
            steps: number of ODE steps, one of `StreamConfig.steps`; 0 for the usual number.

        Raises:
            InputError: the voice does not fit the model, or steps are not allowed.
            LimitError: the cache has no room for another stream.
        """
        voice.check(self.config)
        return Stream(self.pipeline, voice, steps)

    def synthesize(self, tokens: ArrayLike, voice: Voice, *, steps: int = 0) -> NDArray[np.float32]:
        """Synthesises a whole utterance, (samples_per_token * tokens,) float32.

        The samples are those of `vocode(mel(tokens, voice))` up to float rounding: nothing is
        spoken early.

        Args:
            tokens: (n,) integers, n >= 1, or (n, codebooks).
            voice: prompt and speaker.
            steps: number of ODE steps, as for `stream`.

        Raises:
            InputError: a token or the voice does not fit the model, there are no tokens, or steps
                are not allowed.
        """
        with self.stream(voice, steps=steps) as stream:
            chunks = stream.finish(tokens)
        return np.concatenate([chunk.audio for chunk in chunks])

    def mel(
        self, tokens: ArrayLike, voice: Voice, streaming: bool = True, *, steps: int = 0
    ) -> NDArray[np.float32]:
        """Computes the mel of a whole utterance at once, (bands, ratio * tokens) float32: the
        reference for streams.

        Args:
            tokens: (n,) integers, n >= 1, or (n, codebooks).
            voice: prompt and speaker.
            streaming: whether to use the streaming attention mask, else the full one.
            steps: number of ODE steps, as for `stream`.

        Raises:
            InputError: a token or the voice does not fit the model, or there are no tokens.
        """
        voice.check(self.config)
        array = checked_tokens(tokens, self.config)
        if not array.size:
            raise InputError("tokens", "empty; at least 1 is needed")
        check_steps(steps, self.pipeline.steps)
        with self.pipeline.running():
            return (
                self.pipeline.flow.whole(array, voice, streaming=streaming, steps=steps)
                .cpu()
                .numpy()
            )

    def vocode(self, mel: ArrayLike) -> NDArray[np.float32]:
        """Computes the audio of a whole mel: (80, frames) to (480 * frames,) float32.

        Raises:
            InputError: another shape, no frames, or a value that is not finite.
        """
        array = float_array("mel", mel, 2)
        bands = self.config.mel_bands
        if array.shape[0] != bands or not array.shape[1]:
            raise InputError(
                "mel", f"shape {array.shape}, expected ({bands}, frames) with at least 1 frame"
            )
        with self.pipeline.running():
            return self.pipeline.vocoder.whole(torch.from_numpy(array)).cpu().numpy()


def check_settings(folder: Path, stream: StreamConfig, runtime: RuntimeConfig) -> None:
    """Checks, without loading weights, that settings go with a model folder and that this machine
    has what they name.

    Raises:
        ConfigError: a setting that does not go with the model, or a device, engine or memory that
            is not there.
    """
    check_runtime(folder, _config_under(folder, stream), stream, runtime)


def _config_under(folder: Path, stream: StreamConfig) -> ModelConfig:
    """Reads the configuration of a model folder under settings of streams, and refuses settings
    that do not fit.
    """
    config = read_config(folder).with_stream_settings(stream)
    config.check(stream)
    HopSchedule.of(stream, config)
    config.allowed_steps(stream.steps)
    return config
