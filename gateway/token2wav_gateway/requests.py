"""Bodies of requests, with their bounds."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationInfo,
    field_validator,
    model_validator,
)

from token2wav_gateway.encoding import FORMATS
from token2wav_gateway.sentences import Granularity

_MOST_UNKNOWN = 16  # more than a body has fields with two names, such as voice and speaker


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few_unknown_fields(cls, values: Any) -> Any:
        """Leaves out most unknown fields. pydantic would make an error of each unknown field, which
        takes a second for a body of 1 MiB. No other stream gets audio meanwhile.
        """
        if not isinstance(values, dict):
            return values
        unknown = [name for name in values if name not in cls.model_fields]
        surplus = set(unknown[_MOST_UNKNOWN:])
        return {name: value for name, value in values.items() if name not in surplus}


def _encodable(text: str) -> str:
    """Checks that a text can be sent on: JSON may contain half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode, without half of a surrogate pair") from None
    return text


Words: TypeAlias = Annotated[str, AfterValidator(_encodable)]


class VoiceId(_Body):
    """Voice as an object, which OpenAI allows in place of a name."""

    id: Words


def _known_format(name: str) -> str:
    if name not in FORMATS:
        raise ValueError(f"{name[:32]!r} is not one of {', '.join(FORMATS)}")
    return name


def usual_speed(speed: float) -> float:
    """Checks a tempo, which the speech server cannot change."""
    if speed != 1:
        raise ValueError("must be 1, because the speech server cannot change the tempo")
    return speed


class SpeechRequest(_Body):
    """Body of `POST /v1/audio/speech`, with the fields of OpenAI.

    Attributes:
        input: text to say.
        model: one of the models of `GET /v1/models`.
        voice: name of a voice, or an object with its id.
        instructions: how to say the text, for models that follow instructions.
        response_format: pcm, wav, flac, opus, mp3 or aac. `pcm` is 16 bits at 24 kHz.
        stream_format: `audio` for bytes of the format; `sse` for events that contain the bytes in
            base64; None if `stream` decides.
        stream: field of vLLM-Omni: true for events; false for one body with its length and usage.
            None sends audio as soon as the speech server makes audio, as OpenAI does.
        speed: only 1.
        word_timestamps: whether the times of the words follow the audio, in a last event. Only for
            events.
    """

    input: Words
    model: str
    voice: Words | VoiceId
    instructions: Words | None = None
    response_format: str = "mp3"
    stream_format: Literal["audio", "sse"] | None = None
    stream: bool | None = None
    speed: float = 1.0
    word_timestamps: bool = False

    _format = field_validator("response_format")(_known_format)
    _speed = field_validator("speed")(usual_speed)

    @field_validator("word_timestamps")
    @classmethod
    def _with_events(cls, word_timestamps: bool, fields: ValidationInfo) -> bool:
        chosen = fields.data.get("stream_format", "sse")  # a wrong stream_format has its own error
        events = chosen == "sse" or (chosen is None and fields.data.get("stream"))
        if word_timestamps and not events:
            raise ValueError("needs stream_format sse, because audio alone has no place for times")
        return word_timestamps

    @property
    def delivery(self) -> Literal["audio", "sse", "whole"]:
        """Form of the response: pieces of audio, events, or one body."""
        if self.stream_format is not None or self.stream is None:
            return self.stream_format or "audio"
        return "sse" if self.stream else "whole"

    @property
    def voice_name(self) -> str:
        return self.voice if isinstance(self.voice, str) else self.voice.id


def _plain_codes(codes: Any) -> Any:
    """Checks codes up to the first mistake, in place of pydantic.

    pydantic would collect the mistakes of all codes or frames, which takes seconds for a body of 1
    MiB. No other stream gets audio meanwhile.
    """
    if codes == []:
        raise ValueError("empty; a code is needed")
    frames = codes if isinstance(codes, list) and isinstance(codes[0], list) else [codes]
    for frame in frames:
        if not isinstance(frame, list) or not all(type(code) is int for code in frame):
            raise ValueError("must be a list of integers, or a list of lists of integers")
    return codes


Codes: TypeAlias = Annotated[
    SkipValidation[list[int] | list[list[int]]], BeforeValidator(_plain_codes)
]


_FLAT_CODES = "codes.audio"


class StageCodes(BaseModel):
    """Codes in the output of a language model. Other fields of the output are ignored.

    Attributes:
        audio: list of tokens, or list of frames with a code for each codebook.
    """

    audio: Codes


class StageOutput(BaseModel):
    """Output of a language model that vLLM-Omni serves as a stage. Other fields are ignored.

    Attributes:
        codes: object with the codes. A field `codes.audio` of the output can replace the object.
    """

    codes: StageCodes

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, output: Any) -> Any:
        if isinstance(output, dict) and _FLAT_CODES in output:
            return {"codes": {"audio": output[_FLAT_CODES]}, **output}
        return output


class StageRequest(_Body):
    """Body of `POST /v1/stage/run`: speech tokens, or codes of a codec.

    Attributes:
        codes: list of tokens, or list of frames with a code for each codebook.
        stage_output: the codes in the form of vLLM-Omni's pull request 6883, in place of `codes`:
            `{"codes": {"audio": [[1, 2], [3, 4]]}}`.
        finished: field of an output of vLLM-Omni, without effect here.
        max_tokens: limit of vLLM-Omni's decoder, without effect here, because the codes of the body
            bound the audio.
        request_id: name of the request, at most 128 visible characters of ASCII. The response has
            the same name in the header `X-Request-Id`.
        voice: name of a voice; None for a codec.
        response_format: pcm, wav, flac, opus, mp3 or aac.
        speed: only 1.
        stream: whether audio is sent in pieces as soon as possible; else as one body with a length.
    """

    codes: Codes | None = None
    stage_output: StageOutput | None = None
    finished: bool | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")] | None = None
    voice: Words | None = None
    response_format: str = "wav"
    speed: float = 1.0
    stream: bool = False

    _format = field_validator("response_format")(_known_format)
    _speed = field_validator("speed")(usual_speed)

    @model_validator(mode="after")
    def _one_form(self) -> StageRequest:
        if (self.codes is None) == (self.stage_output is None):
            raise ValueError("send either codes or stage_output")
        return self

    @property
    def all_codes(self) -> list[int] | list[list[int]]:
        """Codes of either form. A frame with one code is a token."""
        codes = self.codes
        if codes is None:
            assert self.stage_output is not None
            codes = self.stage_output.codes.audio
        tokens = [frame[0] for frame in codes if isinstance(frame, list) and len(frame) == 1]
        return tokens if len(tokens) == len(codes) else codes


# Names of languages in vLLM-Omni's requests, besides ISO codes.
_LANGUAGES = {
    "auto": "en",
    "chinese": "zh",
    "english": "en",
    "french": "fr",
    "german": "de",
    "italian": "it",
    "japanese": "ja",
    "korean": "ko",
    "portuguese": "pt",
    "russian": "ru",
    "spanish": "es",
}


def _language_code(language: str) -> str:
    code = _LANGUAGES.get(language.lower(), language.partition("-")[0].lower())
    if not re.fullmatch("[a-z]{2,3}", code):
        names = ", ".join(name.capitalize() for name in _LANGUAGES)
        raise ValueError(
            f"{language[:32]!r} is neither an ISO code, such as de, nor one of {names}"
        )
    return code


class SessionConfig(_Body):
    """Message of a WebSocket that configures later utterances, with the fields of vLLM-Omni.

    Attributes:
        type: `session.config`.
        voice: name of a voice, which vLLM-Omni also calls `speaker`.
        model: one of the models of `GET /v1/models`; None if the gateway has only one model.
        instructions: how to say the texts.
        task_type: field of vLLM-Omni, without effect here, because the voice decides.
        stream_audio: whether audio is sent in pieces as soon as possible; else a sentence is one
            message.
        response_format: pcm, wav, flac, opus, mp3 or aac; None for pcm if audio is streamed, else
            wav.
        split_granularity: `sentence`, `clause`, or `none` to say an utterance as one text.
        language: ISO code or English name of the language, for the abbreviations of its sentences.
        speed: only 1.
        events: `binary` sends audio as binary messages, `json` in base64 within events.
        word_timestamps: whether audio is sent as events `audio.chunk`. The last event of a sentence
            has the times of its words. Only for `stream_audio` and pcm.
    """

    type: Literal["session.config"] = "session.config"
    voice: Annotated[Words, Field(validation_alias=AliasChoices("voice", "speaker"))]
    model: str | None = None
    instructions: Words | None = None
    task_type: Literal["CustomVoice", "Base"] | None = None
    stream_audio: bool = False
    response_format: str | None = None
    split_granularity: Granularity = "sentence"
    language: Annotated[str, AfterValidator(_language_code)] = "en"
    speed: float = 1.0
    events: Literal["binary", "json"] = "binary"
    word_timestamps: bool = False

    _speed = field_validator("speed")(usual_speed)

    @field_validator("response_format")
    @classmethod
    def _format(cls, name: str | None) -> str | None:
        return name if name is None else _known_format(name)

    @field_validator("word_timestamps")
    @classmethod
    def _in_chunks(cls, word_timestamps: bool, fields: ValidationInfo) -> bool:
        chosen = fields.data.get("response_format")
        if word_timestamps and not (fields.data.get("stream_audio") and chosen in (None, "pcm")):
            raise ValueError("needs stream_audio and the response_format pcm")
        return word_timestamps

    @property
    def audio_format(self) -> str:
        """Format of the audio."""
        return self.response_format or ("pcm" if self.stream_audio else "wav")


class SocketMessage(_Body):
    """Message of a WebSocket, except `session.config`.

    Attributes:
        type: `input.text` adds a piece of text, `input.done` ends an utterance, `session.close`
            ends the connection after all earlier utterances, and `cancel` drops all text that was
            not spoken yet.
        text: piece of text of `input.text`; None in other messages.
    """

    type: Literal["input.text", "input.done", "session.close", "cancel"]
    text: Words | None = None

    @model_validator(mode="after")
    def _text_where_it_belongs(self) -> SocketMessage:
        if (self.type == "input.text") != (self.text is not None):
            raise ValueError("input.text needs the field text, and other messages have none")
        return self


def problem(errors: list[Any]) -> tuple[str, str]:
    """Returns the first problem that pydantic found, as a field and a sentence."""
    first = errors[0]
    # The other parts of a path are names of the types that pydantic has tried, and positions.
    path = [part for part in first["loc"] if part not in ("body", "query", "path")]
    field = path[0] if path and isinstance(path[0], str) else "body"
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        reason = "is not a known field"
    elif first["type"] in ("model_type", "model_attributes_type"):
        reason = "must be a JSON object"
        if isinstance(first["input"], bytes):  # FastAPI reads JSON only with this header
            reason += ", with the header Content-Type: application/json"
    return field, f"{field}: {reason}"
