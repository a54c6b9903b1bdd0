"""Events that clients of OpenAI's Realtime interface send, as far as they lead to speech."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from token2wav_gateway.doors.requests import Body, Speed, VoiceId, Words, problem
from token2wav_gateway.encoding import FORMATS
from token2wav_gateway.errors import RequestError
from token2wav_gateway.forms import few, matching

_MOST_PARTS = 64  # of the content of an item
_MOST_INPUTS = 64  # items of `response.input`
_MOST_METADATA = 16
_HEARD = {"input_audio", "input_image", "output_audio"}  # types of content without a text
_ID = re.compile(r"[!-~]{1,64}")


def _unset(value: Any) -> None:
    """Checks that a field of a model that listens or answers has no value."""
    if value not in (None, []):
        raise ValueError(
            "not supported, because this gateway speaks texts, and neither listens nor answers"
        )


Unsupported: TypeAlias = Annotated[Any, BeforeValidator(_unset)]
Id: TypeAlias = Annotated[str, matching(_ID.pattern, "1 to 64 visible characters of ASCII")]
Modalities: TypeAlias = Annotated[list[Literal["audio"]], Field(min_length=1, max_length=1)]
Metadata: TypeAlias = Annotated[
    dict[
        Annotated[Words, Field(max_length=64)],
        Annotated[Words, Field(max_length=512)],
    ],
    few(_MOST_METADATA),
]


class AudioFormat(Body):
    """Format of the audio: 16-bit samples, or G.711.

    Attributes:
        rate: sample rate; None for 24000, and 8000 for G.711, which has no other rate.
    """

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    rate: int | None = None

    @field_validator("rate")
    @classmethod
    def _of_the_format(cls, rate: int | None, fields: ValidationInfo) -> int | None:
        if rate is not None and "type" in fields.data:  # a wrong type has its own error
            FORMATS[fields.data["type"].removeprefix("audio/")].check_rate(rate)
        return rate

    @property
    def name(self) -> str:
        """Name of the format in `FORMATS`."""
        return self.type.removeprefix("audio/")

    @property
    def rate_hz(self) -> int:
        return self.rate or FORMATS[self.name].rate_hz

    @property
    def fields(self) -> dict[str, Any]:
        """The format as OpenAI shows it: G.711 without a rate."""
        rate = {"rate": self.rate_hz} if self.name == "pcm" else {}
        return {"type": self.type, **rate}


class AudioInput(Body):
    """Configuration of a microphone, which changes nothing here."""

    format: Any = None
    noise_reduction: Unsupported = None
    transcription: Unsupported = None
    turn_detection: Unsupported = None


class AudioOutput(Body):
    """Configuration of the speech.

    Attributes:
        voice: name of a voice, or an object with its id.
        speed: tempo of the speech, 0.5 to 2.
    """

    format: AudioFormat | None = None
    voice: Words | VoiceId | None = None
    speed: Speed | None = None

    @property
    def voice_name(self) -> str | None:
        return self.voice.id if isinstance(self.voice, VoiceId) else self.voice


class Audio(Body):
    input: AudioInput | None = None
    output: AudioOutput | None = None


class _Options(Body):
    """Options that a session and a response share.

    Attributes:
        instructions: how to say the texts. They are no prompt of a chat.
    """

    audio: Audio | None = None
    instructions: Words | None = None
    max_output_tokens: Literal["inf"] | None = None
    output_modalities: Modalities | None = None
    parallel_tool_calls: Any = None
    prompt: Unsupported = None
    reasoning: Unsupported = None
    tool_choice: Literal["auto", "none"] | None = None
    tools: Unsupported = None

    @property
    def output(self) -> AudioOutput:
        """Configuration of the speech, as far as the options have it."""
        return (self.audio and self.audio.output) or AudioOutput()


class SessionOptions(_Options):
    """Options of a session. A field that is not sent stays as it was."""

    type: Literal["realtime"]
    include: Unsupported = None
    model: str | None = None
    tracing: Unsupported = None
    truncation: Any = None


class Content(Body):
    """Part of an item: a text to say."""

    type: Literal["input_text", "output_text", "text"]
    text: Words

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, content: Any) -> Any:
        if isinstance(content, dict) and content.get("type") in _HEARD:
            raise ValueError(
                f"{content['type']} needs a model that listens or sees; this gateway only speaks "
                "texts"
            )
        return content


class Item(Body):
    """Item of the conversation: a message. Its text is spoken unchanged.

    Attributes:
        id: name of the item; None to get one.
        role: role of the speaker, which changes nothing.
    """

    type: Literal["message"]
    role: Literal["user", "assistant"]
    content: Annotated[list[Content], Field(min_length=1, max_length=_MOST_PARTS, fail_fast=True)]
    id: Id | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None

    @field_validator("role", mode="before")
    @classmethod
    def _can_be_spoken(cls, role: Any) -> Any:
        if role == "system":
            raise ValueError(
                "a system message needs a model that answers; send `instructions` for the speech"
            )
        return role

    @property
    def text(self) -> str:
        return " ".join(part.text for part in self.content)


class ResponseOptions(_Options):
    """Options of a response.

    Attributes:
        conversation: `none` leaves the speech out of the conversation.
        input: items to say instead of the conversation.
        metadata: names and values that come back with the response.
    """

    conversation: Literal["auto", "none"] = "auto"
    input: Annotated[list[Item], Field(max_length=_MOST_INPUTS, fail_fast=True)] | None = None
    metadata: Metadata | None = None


class _Event(Body):
    type: str  # a name of `_EVENTS`
    event_id: Id | None = None


class SessionUpdate(_Event):
    session: SessionOptions


class ItemCreate(_Event):
    item: Item
    previous_item_id: Id | None = None


class ItemDelete(_Event):
    item_id: Id


class ItemRetrieve(_Event):
    item_id: Id


class ItemTruncate(_Event):
    """Event that says how much of a speech the listener has heard."""

    item_id: Id
    content_index: Literal[0]
    audio_end_ms: Annotated[int, Field(ge=0)]


class ResponseCreate(_Event):
    response: ResponseOptions | None = None


class ResponseCancel(_Event):
    response_id: Id | None = None


ClientEvent: TypeAlias = (
    SessionUpdate
    | ItemCreate
    | ItemDelete
    | ItemRetrieve
    | ItemTruncate
    | ResponseCreate
    | ResponseCancel
)
_EVENTS: dict[str, type[ClientEvent]] = {
    "session.update": SessionUpdate,
    "conversation.item.create": ItemCreate,
    "conversation.item.delete": ItemDelete,
    "conversation.item.retrieve": ItemRetrieve,
    "conversation.item.truncate": ItemTruncate,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
}


def parse_event(message: Any) -> ClientEvent:
    """Checks an event.

    Raises:
        RequestError: the event is unknown, wrong, or needs a model that listens.
    """
    if not isinstance(message, dict):
        raise RequestError("event: must be a JSON object", param="event")
    kind = message.get("type")
    if isinstance(kind, str) and kind.startswith("input_audio_buffer."):
        raise RequestError(
            "input_audio_buffer: needs a model that listens; this gateway only speaks the texts of "
            "conversation.item.create",
            param="type",
        )
    event = _EVENTS.get(kind) if isinstance(kind, str) else None
    if event is None:
        raise RequestError(
            f"type: {str(kind)[:64]!r} is not one of {', '.join(_EVENTS)}", param="type"
        )
    try:
        return event.model_validate(message)
    except ValidationError as error:
        path, sentence = problem(list(error.errors()), "event")
        raise RequestError(sentence, param=path) from None


def event_id_of(message: Any) -> str | None:
    """Returns the id of an event that may be wrong; None for an event without a valid id."""
    event_id = message.get("event_id") if isinstance(message, dict) else None
    return event_id if isinstance(event_id, str) and _ID.fullmatch(event_id) else None
