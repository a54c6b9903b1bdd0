"""Bodies of requests, with their bounds."""

from __future__ import annotations

import base64
import re
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from token2wav_gateway.encoding import FORMATS
from token2wav_gateway.forms import Pronunciations
from token2wav_gateway.speech.content import Text
from token2wav_gateway.voices.voice_folder import Voice
from token2wav_gateway.words.sentences import Granularity

_FIELD = re.compile("[a-z0-9_]+")
_MAPPINGS = ("metadata", "pronunciations")  # fields with names of the client's choice
_PLACES = ("body", "query", "path")  # of a value in a request, which FastAPI puts before its name


class Body(BaseModel):
    """Body whose unknown fields are refused, and so are values of another type, such as "5" for a
    number. A field with the value null is absent.

    Attributes:
        ignored: names of fields that are accepted, and have no effect.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _present_fields(cls, values: Any) -> Any:
        """Leaves out all unknown fields but the first. pydantic would make an error of each, which
        takes a second for a body of 1 MiB. No other stream gets audio meanwhile.
        """
        if not isinstance(values, dict):
            return values
        present, known = without_nulls(values), cls._known()
        for name in cls.ignored:
            present.pop(name, None)
        unknown = next((name for name in present if name not in known), None)
        return {name: value for name, value in present.items() if name in known or name == unknown}

    @classmethod
    def _known(cls) -> set[str]:
        """Returns the names of all fields; some fields have two, such as voice and speaker."""
        names = set(cls.model_fields)
        for field in cls.model_fields.values():
            if isinstance(field.validation_alias, AliasChoices):
                names |= set(map(str, field.validation_alias.choices))
        return names


def without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """Leaves out fields without a value, which many clients send as null."""
    return {name: value for name, value in values.items() if value is not None}


def _encodable(text: str) -> str:
    """Checks that a text can be sent on: JSON may contain half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode, without half of a surrogate pair") from None
    return text


# Form of a response: pieces of audio, events, or one body.
Delivery: TypeAlias = Literal["audio", "sse", "whole"]
Words: TypeAlias = Annotated[str, AfterValidator(_encodable)]


class VoiceId(Body):
    """Voice as an object, which OpenAI allows in place of a name."""

    id: Words


def _known_format(name: str) -> str:
    if name not in FORMATS:
        raise ValueError(f"{name[:32]!r} is not one of {', '.join(FORMATS)}")
    return name


def _tempo(speed: float) -> float:
    if not 0.5 <= speed <= 2:
        raise ValueError("must be from 0.5 to 2")
    return speed


Speed: TypeAlias = Annotated[float, AfterValidator(_tempo)]


# Names of languages in vLLM-Omni's requests, besides ISO codes.
_LANGUAGES = {
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


def code_of_language(language: str) -> str | None:
    """Returns the ISO code of a language; None for `Auto`.

    Raises:
        ValueError: the text names no language.
    """
    if language.lower() == "auto":
        return None
    code = _LANGUAGES.get(language.lower(), language.partition("-")[0].lower())
    if not re.fullmatch("[a-z]{2,3}", code):
        names = ", ".join(name.capitalize() for name in _LANGUAGES)
        raise ValueError(
            f"{language[:32]!r} is neither an ISO code, such as de, nor one of {names}"
        )
    return code


def name_of_language(code: str | None) -> str:
    """Returns the English name of a language, or its code if it is not one of vLLM-Omni's."""
    names = {code: name.capitalize() for name, code in _LANGUAGES.items()}
    return "Auto" if code is None else names.get(code, code)


def _recording(url: Any) -> bytes:
    """Reads the recording in a data URL.

    The gateway fetches no URL, because it may reach hosts that its clients must not reach.
    """
    head, comma, content = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        raise ValueError(
            "must be a data URL in base64, such as data:audio/wav;base64,UklGR..., because the "
            "gateway fetches no recordings"
        )
    try:
        return base64.b64decode(content, validate=True)
    except ValueError:
        raise ValueError("is no valid base64") from None


class AudioFields(Body):
    """Format of audio, in bodies over HTTP and over a WebSocket.

    Attributes:
        response_format: pcm, wav, flac, opus, mp3, aac, or G.711 as pcmu or pcma; None for the
            default. `pcm` is 16 bits in one channel.
        sample_rate: 8000, 16000, 22050, 24000, 44100 or 48000 Hz; `opus` has neither 22050 nor
            44100, and G.711 only 8000. None for 8000 of G.711, and 24000 of all others.
        speed: tempo of the speech, 0.5 to 2; only 1 for a codec.
    """

    response_format: Annotated[str, AfterValidator(_known_format)] | None = None
    sample_rate: int | None = None
    speed: Speed = 1.0

    @field_validator("sample_rate")
    @classmethod
    def _of_the_format(cls, rate_hz: int | None, fields: ValidationInfo) -> int | None:
        if rate_hz is not None:  # the default formats have all rates
            FORMATS[fields.data.get("response_format") or "pcm"].check_rate(rate_hz)
        return rate_hz


class Sampling(Body):
    """Sampling parameters of the language model; None for those of its template.

    Attributes:
        temperature: 0 to 2; 0 selects the likeliest token.
        top_p: greater than 0, at most 1.
        top_k: number of tokens to sample from; -1 or 0 for all, as the server defines it.
        repetition_penalty: greater than 0, at most 2; 1 for none.
    """

    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=2)] = None


class SpeechFields(AudioFields, Sampling):
    """Fields of a speech, the same over HTTP and over a WebSocket, with the names of OpenAI and
    vLLM-Omni.

    Attributes:
        model: one of the models of `GET /v1/models`; None for the only model.
        voice: name of a voice, or an object with its id. vLLM-Omni also calls it `speaker`. None
            for the default voice.
        ref_audio: recording of the voice, as a data URL in base64. It replaces `voice`.
        ref_text: words of the recording; empty if they are unknown.
        instructions: how to say the text, for models that follow instructions.
        seed: seed of the language model.
        max_new_tokens: largest number of tokens that the language model may send for a text.
        language: ISO code or English name of the language; None, or `Auto`, if it is unknown.
        pronunciations: spellings of words for the language model, by the words.
        extra_params: sampling parameters, where vLLM-Omni has them. Those outside it go first.
    """

    ignored: ClassVar[frozenset[str]] = frozenset(
        {"initial_codec_chunk_frames", "non_streaming_mode", "task_type", "x_vector_only_mode"}
    )
    model: str | None = None
    voice: Annotated[
        Words | VoiceId | None, Field(validation_alias=AliasChoices("voice", "speaker"))
    ] = None
    ref_audio: Annotated[bytes | None, BeforeValidator(_recording)] = None
    ref_text: Words = ""
    instructions: Words | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    max_new_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    language: Annotated[str | None, AfterValidator(code_of_language)] = None
    pronunciations: Pronunciations = Field(default_factory=dict)
    extra_params: Sampling = Sampling()

    @field_validator("ref_text")
    @classmethod
    def _of_a_recording(cls, ref_text: str, fields: ValidationInfo) -> str:
        # A wrong recording is not among the fields, and has its own error.
        if ref_text and fields.data.get("ref_audio", b"") is None:
            raise ValueError("needs the recording of its words in ref_audio")
        return ref_text

    @property
    def voice_name(self) -> str | None:
        """Name of the voice; None if the client names no voice."""
        return self.voice.id if isinstance(self.voice, VoiceId) else self.voice

    @property
    def language_code(self) -> str:
        """ISO code of the language. Its abbreviations end no sentence."""
        return self.language or "en"

    @property
    def sampling(self) -> dict[str, float]:
        """Fields of the request to the language model that the client has set."""
        set_here = {name: getattr(self, name) for name in Sampling.model_fields}
        lengths = {"seed": self.seed, "max_tokens": self.max_new_tokens}
        return without_nulls(self.extra_params.model_dump()) | without_nulls(set_here | lengths)

    def text(self, words: str, voice: Voice) -> Text:
        """Returns a text with the manner of these fields."""
        return Text(
            words,
            voice,
            self.instructions,
            self.sampling,
            self.speed,
            language=name_of_language(self.language),
            pronunciations=self.pronunciations,
        )


class SpeechRequest(SpeechFields):
    """Body of `POST /v1/audio/speech`.

    Attributes:
        input: text to say.
        stream_format: `audio` for bytes of the format; `sse` for events that contain the bytes in
            base64; None if `stream` decides.
        stream: field of vLLM-Omni: true for events; false for one body with its length and usage.
            None sends audio as soon as the speech server makes audio, as OpenAI does.
        word_timestamps: whether the times of the words follow the audio, in a last event. Only for
            events.
    """

    input: Words
    stream_format: Literal["audio", "sse"] | None = None
    stream: bool | None = None
    word_timestamps: bool = False

    @field_validator("word_timestamps")
    @classmethod
    def _with_events(cls, word_timestamps: bool, fields: ValidationInfo) -> bool:
        chosen = fields.data.get("stream_format", "sse")  # a wrong stream_format has its own error
        events = chosen == "sse" or (chosen is None and fields.data.get("stream"))
        if word_timestamps and not events:
            raise ValueError("needs stream_format sse, because audio alone has no place for times")
        return word_timestamps

    @property
    def delivery(self) -> Delivery:
        if self.stream_format is not None or self.stream is None:
            return self.stream_format or "audio"
        return "sse" if self.stream else "whole"

    @property
    def audio_format(self) -> str:
        return self.response_format or "mp3"


class SessionConfig(SpeechFields):
    """Message of a WebSocket that configures later utterances.

    Attributes:
        type: `session.config`.
        stream_audio: whether audio is sent in pieces as soon as possible; else a sentence is one
            message. It decides the default of `response_format`: pcm if audio is streamed, else
            wav.
        split_granularity: `sentence`, `clause`, or `none` to say an utterance as one text.
        events: `binary` sends audio as binary messages, `json` in base64 within events.
        word_timestamps: whether audio is sent as events `audio.chunk`. The last event of a sentence
            has the times of its words. Only for `stream_audio` and pcm.
    """

    ignored: ClassVar[frozenset[str]] = SpeechFields.ignored | {"stream", "stream_format"}
    type: Literal["session.config"] = "session.config"
    stream_audio: bool = False
    split_granularity: Granularity = "sentence"
    events: Literal["binary", "json"] = "binary"
    word_timestamps: bool = False

    @field_validator("word_timestamps")
    @classmethod
    def _in_chunks(cls, word_timestamps: bool, fields: ValidationInfo) -> bool:
        chosen = fields.data.get("response_format")
        if word_timestamps and not (fields.data.get("stream_audio") and chosen in (None, "pcm")):
            raise ValueError("needs stream_audio and the response_format pcm")
        return word_timestamps

    @property
    def audio_format(self) -> str:
        return self.response_format or ("pcm" if self.stream_audio else "wav")


class SocketMessage(Body):
    """Message of a WebSocket, except `session.config`.

    Attributes:
        type: `input.text` adds a piece of text, `input.done` ends an utterance, `session.close`
            ends the connection after all earlier utterances, and `cancel` drops all text that was
            not spoken yet.
        text: piece of text of `input.text`; None in other messages.
        played_ms: milliseconds of audio that the client of `cancel` has played since it connected,
            or since its last `cancel`; None if it does not know.
    """

    type: Literal["input.text", "input.done", "session.close", "cancel"]
    text: Words | None = None
    played_ms: Annotated[int | None, Field(ge=0)] = None

    @model_validator(mode="after")
    def _fields_where_they_belong(self) -> SocketMessage:
        if (self.type == "input.text") != (self.text is not None):
            raise ValueError("input.text needs the field text, and other messages have none")
        if self.played_ms is not None and self.type != "cancel":
            raise ValueError("only cancel has the field played_ms")
        return self


def problem(errors: list[Any], root: str = "body") -> tuple[str, str]:
    """Returns the first problem that pydantic found, as the path of a field and a sentence.

    Args:
        root: name of the whole message.
    """
    first = errors[0]
    unknown = first["type"] == "extra_forbidden"
    location = first["loc"][:-1] if unknown else first["loc"]
    if mapping := next((part for part in location if part in _MAPPINGS), None):
        location = location[: location.index(mapping) + 1]
    # The other parts of a path are positions, and names of the types that pydantic has tried.
    path = [part for part in location if _is_field(part) and part not in _PLACES]
    reason = first["msg"].removeprefix("Value error, ")
    if unknown:
        name = str(first["loc"][-1])[:64]
        reason = f"{name!r} is not a known field" if path else "is not a known field"
        path = path or [name]
    elif first["type"] in ("model_type", "model_attributes_type"):
        reason = "must be a JSON object"
        if isinstance(first["input"], bytes):  # FastAPI reads JSON only with this header
            reason += ", with the header Content-Type: application/json"
    field = ".".join(path) or root
    return field, f"{field}: {reason}"


def _is_field(part: Any) -> bool:
    return isinstance(part, str) and part != "str" and _FIELD.fullmatch(part) is not None
