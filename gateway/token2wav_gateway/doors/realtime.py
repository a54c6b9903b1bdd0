"""Session of OpenAI's Realtime interface: the messages of a conversation are spoken without change.

OpenAI's model answers a conversation. This gateway has neither a model that answers nor a
model that listens. A response speaks the messages that no response has spoken yet, word by word.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from fastapi import WebSocket

from token2wav_gateway.doors.realtime_events import (
    AudioFormat,
    ItemCreate,
    ItemDelete,
    ItemRetrieve,
    ItemTruncate,
    ResponseCancel,
    ResponseCreate,
    ResponseOptions,
    SessionOptions,
    SessionUpdate,
    event_id_of,
    parse_event,
)
from token2wav_gateway.doors.realtime_response import Order, SpokenResponse, new_id
from token2wav_gateway.doors.socket_session import SocketSession
from token2wav_gateway.errors import GatewayError, NotFoundError, RequestError
from token2wav_gateway.forms import check_length
from token2wav_gateway.gateway import Caller
from token2wav_gateway.speech.content import Text
from token2wav_gateway.words.sentences import has_words

_VOICE = "alloy"  # of a session without a voice; the setting `voices.default` speaks for it
# Events that count as requests of the key, also if they are refused.
_COUNTED = ("session.update", "response.create")
_MOST_ITEMS = 256  # of the conversation; the oldest spoken items are deleted


@dataclass
class _Item:
    """Item of the conversation.

    Attributes:
        text: text that no response has spoken yet; None for other items.
        message: the item as the client has sent it; empty for a speech.
        speech: the speech; None for an item of the client.
        cut_ms: milliseconds of the speech that the client has played; None if it gave no number.
    """

    id: str
    text: str | None = None
    message: dict[str, Any] = field(default_factory=dict)
    speech: SpokenResponse | None = None
    cut_ms: int | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The item as OpenAI shows it. A speech that was cut has the words that were heard."""
        return self.message if self.speech is None else self.speech.item(self.cut_ms)


class RealtimeSession(SocketSession[SpokenResponse]):
    """Session of OpenAI's protocol, which speaks responses.

    Args:
        caller: client of the socket. Each `session.update`, each `response.create` and each further
            sentence of a response count as requests of its key.
    """

    message_noun = "event"

    def __init__(self, caller: Caller, socket: WebSocket, ending: asyncio.Event) -> None:
        super().__init__(caller, socket, ending)
        self._id, self._conversation_id = new_id("sess"), new_id("conv")
        self._model = socket.query_params.get("model") or self._gateway.settings.models[0]
        self._voice_name, self._speed, self._format = _VOICE, 1.0, AudioFormat()
        self._instructions: str | None = None
        self._items: list[_Item] = []
        self._response: SpokenResponse | None = None  # that is being spoken

    async def _begin(self) -> None:
        self._gateway.check_model(self._model)
        await self._send("session.created", session=self._session())

    async def _report(self, error: GatewayError, message: Any) -> None:
        body = error.body["error"] | {"event_id": event_id_of(message)}
        await self._send("error", error=body)

    async def _take(self, message: Any) -> None:
        if isinstance(message, dict) and message.get("type") in _COUNTED:
            self._caller.holder.count_request()
        event = parse_event(message)
        if isinstance(event, SessionUpdate):
            self._update(event.session)
            await self._send("session.updated", session=self._session())
        elif isinstance(event, ItemCreate):
            await self._create_item(event)
        elif isinstance(event, ItemDelete):
            self._items.remove(self._item(event.item_id))
            await self._send("conversation.item.deleted", item_id=event.item_id)
        elif isinstance(event, ItemRetrieve):
            item = self._item(event.item_id, code="item_retrieve_invalid_item_id")
            await self._send("conversation.item.retrieved", item=item.fields)
        elif isinstance(event, ItemTruncate):
            await self._truncate(event)
        elif isinstance(event, ResponseCreate):
            await self._respond(event.response or ResponseOptions())
        else:
            self._cancel(event)

    def _update(self, options: SessionOptions) -> None:
        """Changes the configuration of the session, or nothing if an option is wrong."""
        if options.instructions is not None:
            self._check_length("session.instructions", options.instructions)
        if options.model is not None:
            self._gateway.check_model(options.model)
        output = options.output
        if output.voice_name:
            self._gateway.voices.get(output.voice_name)
            self._voice_name = output.voice_name
        self._model = options.model or self._model
        self._speed = output.speed or self._speed
        self._format = output.format or self._format
        if options.instructions is not None:
            self._instructions = options.instructions or None

    def _check_length(self, field: str, text: str) -> None:
        check_length(field, text, self._limits.text_characters)

    async def _create_item(self, event: ItemCreate) -> None:
        item = event.item
        waiting = sum(len(item.text) for item in self._items if item.text is not None)
        if waiting + len(item.text) > self._limits.text_characters:
            raise RequestError(
                f"item.content: {waiting + len(item.text)} characters wait to be spoken; at most "
                f"{self._limits.text_characters} are allowed",
                param="item.content",
            )
        if item.id is not None and any(item.id == other.id for other in self._items):
            raise RequestError(
                f"item.id: an item {item.id!r} exists",
                param="item.id",
                code="item_create_duplicate_item_id",
            )
        await self._make_room()
        position = len(self._items)
        if event.previous_item_id == "root":
            position = 0
        elif event.previous_item_id is not None:
            position = self._items.index(self._item(event.previous_item_id)) + 1
        previous = self._items[position - 1].id if position else None
        item_id, content = item.id or new_id("item"), [part.model_dump() for part in item.content]
        stored = {
            "id": item_id,
            "object": "realtime.item",
            "type": "message",
            "status": "completed",
            "role": item.role,
            "content": content,
        }
        self._items.insert(position, _Item(item_id, item.text, stored))
        for kind in ("added", "done"):
            await self._send(f"conversation.item.{kind}", previous_item_id=previous, item=stored)

    async def _make_room(self) -> None:
        """Deletes the oldest item that was spoken if there is no room for another item."""
        if len(self._items) >= _MOST_ITEMS:
            oldest = next((other for other in self._items if other.text is None), None)
            if oldest is None:
                raise RequestError(f"item: {_MOST_ITEMS} items wait to be spoken", param="item")
            self._items.remove(oldest)
            await self._send("conversation.item.deleted", item_id=oldest.id)

    async def _truncate(self, event: ItemTruncate) -> None:
        """Cuts a speech at the place to which it was heard, and sends the client its text."""
        item = self._item(event.item_id)
        if item.speech is None:
            raise RequestError("item_id: only a speech can be truncated", param="item_id")
        audio_ms = item.speech.audio_ms if item.cut_ms is None else item.cut_ms
        if event.audio_end_ms > audio_ms:
            raise RequestError(
                f"audio_end_ms: {event.audio_end_ms} is after the end of the speech, {audio_ms} ms",
                param="audio_end_ms",
            )
        item.cut_ms = event.audio_end_ms
        await self._send(
            "conversation.item.truncated",
            item_id=event.item_id,
            content_index=0,
            audio_end_ms=event.audio_end_ms,
            transcript=item.fields["content"][0]["transcript"],
        )

    async def _respond(self, options: ResponseOptions) -> None:
        """Starts to speak, in a task of its own."""
        if self._response is not None:
            raise RequestError(
                f"response.create: {self._response.id} is being spoken; wait for response.done, or "
                "send response.cancel",
                param="type",
                code="conversation_already_has_active_response",
            )
        waiting = [item for item in self._items if item.text is not None]
        texts = [item.text or "" for item in waiting]
        if options.input is not None:
            waiting, texts = [], [item.text for item in options.input]
        text = "\n".join(texts)
        if not has_words(text):
            raise RequestError(
                "response.create: no text waits to be spoken; send conversation.item.create before",
                param="type",
            )
        self._check_length("response.input", "".join(texts))
        if options.instructions is not None:
            self._check_length("response.instructions", options.instructions)
        output = options.output
        voice_name = output.voice_name or self._voice_name
        in_conversation = options.conversation == "auto"
        instructions = options.instructions
        content = Text(
            text,
            self._gateway.voices.get(voice_name),
            self._instructions if instructions is None else instructions or None,
            speed=output.speed or self._speed,
        )
        for item in waiting:
            item.text = None
        if in_conversation:
            await self._make_room()
        order = Order(
            content,
            voice_name,
            output.format or self._format,
            self._conversation_id if in_conversation else None,
            self._items[-1].id if self._items else None,
            options.metadata,
        )
        response = SpokenResponse(self._caller, self._send, order)
        if in_conversation:
            self._items.append(_Item(response.item_id, speech=response))
        self._response = response
        self._waiting.put_nowait(response)

    async def _speak_all(self) -> None:
        while True:
            response = await self._waiting.get()
            await response.run()
            self._response = None
            self._waiting.task_done()
            self._restart_idle_clock()

    def _cancel(self, event: ResponseCancel) -> None:
        response = self._response
        if response is None or event.response_id not in (None, response.id):
            # LiveKit's client recognises this error by its first words, and Pipecat's by its code.
            raise RequestError(
                "Cancellation failed: this response is not being spoken",
                param="response_id",
                code="response_cancel_not_active",
            )
        response.cancel()

    def _item(self, name: str, code: str | None = None) -> _Item:
        for item in self._items:
            if item.id == name:
                return item
        raise NotFoundError(f"item_id: there is no item {name!r}", param="item_id", code=code)

    def _session(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "realtime.session",
            "type": "realtime",
            "model": self._model,
            "output_modalities": ["audio"],
            "instructions": self._instructions or "",
            "tools": [],
            "tool_choice": "none",
            "max_output_tokens": "inf",
            "audio": {
                "input": {
                    "format": AudioFormat().fields,
                    "turn_detection": None,
                    "transcription": None,
                },
                "output": {
                    "format": self._format.fields,
                    "voice": self._voice_name,
                    "speed": self._speed,
                },
            },
        }

    async def _send(self, kind: str, **content: Any) -> None:
        await self._send_json({"type": kind, "event_id": new_id("event"), **content})

    def _speaks(self) -> bool:
        return self._response is not None
