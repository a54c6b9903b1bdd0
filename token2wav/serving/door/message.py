"""Messages of clients: their tokens, their options and their voice, without a protocol."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from token2wav.config.model_config import ModelConfig
from token2wav.config.values import shown
from token2wav.errors import InputError
from token2wav.serving.audio_output import AudioFormat
from token2wav.serving.door.sequences import CLIENT_HEADER, STREAM_KEY, Owner, SequenceId
from token2wav.serving.door.voice_registry import VoiceRegistry
from token2wav.serving.options import DEFAULTS, UtteranceOptions
from token2wav.voice import FIELDS, NO_VOICE, Voice, voice_for

VOICE_ID = "voice_id"
PARAMETERS = (
    "audio_format",
    "sample_rate",
    "keep_open",
    "steps",
    "decoder_noise",
    "delays",
    "end_after_repeats",
    "end_after_silence_s",
    "speed",
    "voice",
    STREAM_KEY,
    CLIENT_HEADER,
)
_OWNER = frozenset((STREAM_KEY, CLIENT_HEADER))
_DELAYS = re.compile(r"[0-9]{1,4}(,[0-9]{1,4}){0,63}")

Parameters = dict[str, Any]  # parameters of a message by name: strings, numbers and booleans


@dataclass(frozen=True)
class Options:
    """Options in the parameters of the first message of an utterance.

    Later messages may repeat the parameters. They are checked again, but have no effect.
    """

    utterance: UtteranceOptions = DEFAULTS
    keep_open: bool = False  # whether the reply to the first message stays open until the end
    voice: str = ""  # name of a voice of the server; empty for none

    @classmethod
    def of(cls, parameters: Parameters) -> Options:
        """Reads the options from the parameters of a message. Raises InputError if a parameter is
        unknown, or its value is not allowed.
        """
        # Most messages continue an utterance, and have only its key.
        if parameters.keys() <= _OWNER:
            return cls()
        for name in parameters:
            if name not in PARAMETERS:
                known = ", ".join(key for key in PARAMETERS if key != CLIENT_HEADER)
                # The error names the field "parameters" and not the unknown parameter. Errors are
                # counted by field, and clients could invent any number of names.
                raise InputError(
                    "parameters",
                    f"{shown(name)} is not a request parameter; expected one of {known}",
                )
        audio_format = AudioFormat(
            parameters.get("audio_format", "float32"), parameters.get("sample_rate")
        )
        keep_open = parameters.get("keep_open", False)
        if not isinstance(keep_open, bool):
            raise InputError("keep_open", f"{shown(keep_open)} is not a boolean")
        steps = parameters.get("steps")
        if steps is not None and (type(steps) is not int or steps < 1):
            raise InputError("steps", f"{shown(steps)} is not an integer of at least 1")
        decoder_noise = parameters.get("decoder_noise")
        if decoder_noise is not None and not isinstance(decoder_noise, bool):
            raise InputError("decoder_noise", f"{shown(decoder_noise)} is not a boolean")
        voice = parameters.get("voice")
        if voice is not None and (not isinstance(voice, str) or not voice):
            raise InputError("voice", f"{shown(voice)} is not a valid voice name")
        delays = _delays(parameters.get("delays"))
        utterance = UtteranceOptions(
            steps or 0,
            decoder_noise,
            delays,
            audio_format,
            parameters.get("end_after_repeats"),
            parameters.get("end_after_silence_s"),
            parameters.get("speed", 1.0),
        )
        return cls(utterance, keep_open, voice or "")


def _delays(value: Any) -> tuple[int, ...] | None:
    """Reads the delays of the codebooks, integers with commas between them."""
    if value is None:
        return None
    if not isinstance(value, str) or not _DELAYS.fullmatch(value):
        raise InputError("delays", f"{shown(value)} is not a text of integers such as '0,1,2'")
    return tuple(map(int, value.split(",")))


@dataclass(frozen=True, eq=False)
class Message:
    """Message of a client: some tokens of one utterance.

    An error in the options, in the voice or in the tokens also closes the stream that the message
    continues. So the caller first finds the stream, and then calls `options` and `voice`, which
    raise such errors.

    Attributes:
        sequence_id: id that all messages of the utterance share. A message with an empty id (0 or
            "") is a whole utterance.
        parameters: parameters of the message, not checked yet.
        tokens: tokens, not checked yet; empty if the message has no tokens.
        voice_inputs: arrays that describe a voice, by name, as far as the message has them.
        error: error that was found while the message was read.
    """

    sequence_id: SequenceId
    start: bool
    end: bool
    owner: Owner
    parameters: Parameters
    tokens: NDArray[Any]
    voice_inputs: dict[str, NDArray[Any]]
    error: InputError | None = None

    def options(self) -> Options:
        """Returns the options in the parameters. Raises `error`, or InputError as `Options.of`, or
        if the message continues an utterance and carries a voice.
        """
        if self.error is not None:
            raise self.error
        options = Options.of(self.parameters)
        if self.voice_inputs and not self.start:
            name = next(iter(self.voice_inputs))
            raise InputError(name, "only the first request of an utterance may have this field")
        return options

    def voice(self, name: str, voices: VoiceRegistry, config: ModelConfig) -> Voice:
        """Returns the voice of an utterance from its first message.

        A message gives the voice in one of three ways: by name, by its id (a hash), or as tensors.

        Args:
            name: name of the voice in the options; empty if there is none.
            config: limits the shapes of the voice.

        Raises:
            InputError: the name or the id is unknown; the message gives the voice in more than one
                way; a tensor of the voice is missing; the voice does not fit the model; or the
                model takes no voice.
        """
        if not config.takes_voice:
            if name or self.voice_inputs:
                raise InputError("voice" if name else next(iter(self.voice_inputs)), NO_VOICE)
            return voice_for(config, None)
        tensors = {
            field: self.voice_inputs[field] for field in FIELDS if field in self.voice_inputs
        }
        digest = self.voice_inputs.get(VOICE_ID)
        if name or digest is not None:
            if tensors or (name and digest is not None):
                raise InputError(
                    "voice" if name else VOICE_ID,
                    "sent together with a voice; send only one of them",
                )
            return voices.named(name) if digest is None else voices.get(digest.tobytes().hex())
        if missing := [field for field in FIELDS if field not in tensors]:
            raise InputError(
                missing[0], "missing; the first request of an utterance needs it, or a voice_id"
            )
        voice = Voice(**tensors)
        voice.check(config)
        return voice
