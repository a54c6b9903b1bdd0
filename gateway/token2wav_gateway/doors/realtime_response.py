"""Response of OpenAI's Realtime interface: the events of one speech."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from token2wav_gateway.doors.realtime_events import AudioFormat
from token2wav_gateway.errors import GatewayError
from token2wav_gateway.gateway import Caller
from token2wav_gateway.speech.content import Audio, Text, Words
from token2wav_gateway.speech.playout import Playout
from token2wav_gateway.words.sentences import SentenceSplitter

# Sends an event with a type and further fields.
Send: TypeAlias = Callable[..., Awaitable[None]]
Status: TypeAlias = Literal["in_progress", "completed", "cancelled", "incomplete", "failed"]
_WORDS_S = 0.3  # for the last words of a sentence to be found, before the next sentence begins
_REASONS = {"length": "max_output_tokens"}  # as OpenAI names the limit


def new_id(prefix: str) -> str:
    """Returns a new name, such as `resp_1f...`."""
    return f"{prefix}_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class Order:
    """Order of a client: a text and its manner.

    Attributes:
        voice_name: name of the voice, as the client wrote it.
        conversation_id: name of the conversation; None for a speech outside it.
        previous_item_id: item after which the speech stands in the conversation; None for none.
        metadata: names and values of the client.
    """

    content: Text
    voice_name: str
    format: AudioFormat
    conversation_id: str | None
    previous_item_id: str | None
    metadata: dict[str, str] | None


class SpokenResponse:
    """Speech of a text, with its events.

    Args:
        caller: client of the session. Each sentence after the first counts as a request of its key.

    Attributes:
        id: name of the response.
        item_id: name of the item that holds the speech.
        playout: time line of the speech, which finds the text that was heard.
        status: status of its item.
    """

    def __init__(self, caller: Caller, send: Send, order: Order) -> None:
        self.id, self.item_id = new_id("resp"), new_id("item")
        self.playout = Playout()
        self.status = "in_progress"
        self._caller = caller
        self._send = send
        self._order = order
        splitter = SentenceSplitter(caller.gateway.settings.limits.text_characters)
        self._sentences = [*splitter.feed(order.content.text), *splitter.close()]
        self._transcript = ""
        self._samples = self._tokens = 0
        self._rate_hz = order.format.rate_hz
        self._speaking: asyncio.Task[None] | None = None
        self._cancelled = False
        self._end_reason: str | None = None

    @property
    def audio_ms(self) -> int:
        """Duration of the audio that was sent or is being sent, in milliseconds."""
        return -(-1000 * self._samples // self._rate_hz)

    def cancel(self) -> None:
        """Stops the speech. `run` then sends the last events. A second call changes nothing."""
        if self._cancelled:
            return
        self._cancelled = True
        if self._speaking is not None:
            self._speaking.cancel()

    async def run(self) -> None:
        """Sends all events of the response. An error of the speech becomes its status."""
        await self._begin()
        self._speaking = asyncio.create_task(self._speak())
        if self._cancelled:
            self._speaking.cancel()
        try:
            await asyncio.wait({self._speaking})
        finally:  # the session may end
            self._speaking.cancel()
            await asyncio.wait({self._speaking})
        if self._speaking.cancelled():
            _, heard = self.playout.heard()
            await self._end("cancelled", {"reason": "client_cancelled", "heard": heard})
        elif isinstance(error := self._speaking.exception(), GatewayError):
            await self._end("failed", {"error": error.body["error"]})
        elif error is not None:
            raise error
        elif self._end_reason is not None:  # a limit of a server has ended a sentence
            reason = _REASONS.get(self._end_reason, self._end_reason)
            await self._end("incomplete", {"reason": reason})
        else:
            await self._end("completed")

    async def _begin(self) -> None:
        await self._send("response.created", response=self._response("in_progress"))
        item = self.item() | {"content": []}
        await self._send_of_response("response.output_item.added", item=item)
        await self._send_of_conversation("conversation.item.added", item)
        part = {"type": "audio", "transcript": ""}
        await self._send_of_part("response.content_part.added", part=part)

    async def _speak(self) -> None:
        order = self._order
        parts = _slices(order.content.text, self._sentences)
        for index, (sentence, part) in enumerate(zip(self._sentences, parts, strict=True)):
            text = replace(order.content, text=sentence)
            # The first sentence was counted with its event.
            turn = self._caller.turn(
                text,
                order.format.name,
                self._rate_hz,
                further=index > 0,
                words=True,
                words_within=lambda: _WORDS_S,
            )
            turn.admit()
            part = part.removesuffix(sentence) + await turn.spoken_text()
            self._transcript += part
            self.playout.begin(part)
            await self._send_of_part("response.output_audio_transcript.delta", delta=part)
            before = self._samples
            try:
                async with aclosing(turn.events()) as events:
                    async for event in events:
                        if isinstance(event, Words):
                            self.playout.align(event.times or ())
                        elif isinstance(event, Audio):
                            sent = before + event.samples - self._samples
                            self._samples += sent
                            self.playout.add(sent / self._rate_hz, turn.whole_s)
                            delta = base64.b64encode(event.content).decode()
                            await self._send_of_part("response.output_audio.delta", delta=delta)
            finally:
                self._tokens += turn.ended.usage["output_tokens"]
                self._end_reason = turn.ended.reason or self._end_reason

    async def _end(self, status: Status, details: dict[str, Any] | None = None) -> None:
        transcript = self._transcript
        await self._send_of_part("response.output_audio.done")
        await self._send_of_part("response.output_audio_transcript.done", transcript=transcript)
        part = {"type": "audio", "transcript": transcript}
        await self._send_of_part("response.content_part.done", part=part)
        self.status = "completed" if status == "completed" else "incomplete"
        item = self.item()
        await self._send_of_conversation("conversation.item.done", item)
        await self._send_of_response("response.output_item.done", item=item)
        response = self._response(status)
        characters = len(self._order.content.text)
        response |= {
            "output": [item],
            "status_details": {"type": status, **details} if details else None,
            "usage": {
                "input_tokens": characters,
                "output_tokens": self._tokens,
                "total_tokens": characters + self._tokens,
                "input_token_details": {"text_tokens": characters, "audio_tokens": 0},
                "output_token_details": {"text_tokens": 0, "audio_tokens": self._tokens},
            },
        }
        await self._send("response.done", response=response)

    async def _send_of_response(self, kind: str, **content: Any) -> None:
        await self._send(kind, response_id=self.id, output_index=0, **content)

    async def _send_of_part(self, kind: str, **content: Any) -> None:
        await self._send_of_response(kind, item_id=self.item_id, content_index=0, **content)

    async def _send_of_conversation(self, kind: str, item: dict[str, Any]) -> None:
        if self._order.conversation_id is not None:
            await self._send(kind, previous_item_id=self._order.previous_item_id, item=item)

    def item(self, cut_ms: int | None = None) -> dict[str, Any]:
        """Returns the item of the speech.

        Args:
            cut_ms: end of the audio that the listener has heard, if it has not heard all; the
                transcript has its words.
        """
        transcript = self._transcript
        if cut_ms is not None:
            transcript = self.playout.heard(cut_ms / 1000)[1]
        return {
            "id": self.item_id,
            "object": "realtime.item",
            "type": "message",
            "status": self.status,
            "role": "assistant",
            "content": [{"type": "output_audio", "transcript": transcript}],
        }

    def _response(self, status: Status) -> dict[str, Any]:
        output = {"format": self._order.format.fields, "voice": self._order.voice_name}
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "status_details": None,
            "output": [],
            "conversation_id": self._order.conversation_id,
            "output_modalities": ["audio"],
            "max_output_tokens": "inf",
            "audio": {"output": output},
            "metadata": self._order.metadata,
            "usage": None,
        }


def _slices(text: str, sentences: Sequence[str]) -> Iterator[str]:
    """Yields the part of a text that ends with each of its sentences.

    Together they are the text, without white space at its ends.
    """
    start = 0
    for sentence in sentences:
        position = text.find(sentence, start)
        end = position + len(sentence)
        yield text[start:end].lstrip() if not start else text[start:end]
        start = end
