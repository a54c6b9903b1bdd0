"""Lines to the doors of a gateway under test: a client of each interface, with the same methods."""

from __future__ import annotations

import base64
import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar
from urllib.parse import urlsplit

import grpc
import httpx
import riva.client
from openai import OpenAI
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.gateway_rig import VOICE, GatewayRig
from testkit.rigs.gateway_socket import CONFIG, address
from testkit.rigs.gateway_speech import body, events_of

_ENCODINGS = {
    "pcm": riva.client.AudioEncoding.LINEAR_PCM,
    "pcmu": riva.client.AudioEncoding.MULAW,
    "pcma": riva.client.AudioEncoding.ALAW,
}
_RECEIVED_BYTES = 64 << 10


class Line(ABC):
    """Connection to a door, which says one text after the other.

    Args:
        key: key of the client; empty for none.
        trace: header `traceparent`; empty for none.
        words: whether the client asks for the times of the words.
        audio: format and sample rate of the audio.
        voice: name of the voice.

    Attributes:
        has_words: whether the door has these times.
        times: the words of the last text with their starts and ends in milliseconds.
        error: sentence of the last error; empty for none.
        end_reason: limit that cut the last text off; empty for none.
        spoken: the last text as the door says that it was spoken; empty for a door without texts.
        heard: text that was heard before an interruption.
    """

    has_words: ClassVar[bool] = False
    error = ""
    end_reason = ""
    spoken = ""
    heard = ""

    def __init__(
        self,
        gateway: GatewayRig,
        key: str = "",
        trace: str = "",
        *,
        words: bool = False,
        audio: tuple[str, int] = ("pcm", 24_000),
        voice: str = VOICE,
    ) -> None:
        self.headers: dict[str, str] = {}
        self._voice = voice
        self.times: list[tuple[str, int, int]] = []
        self._words = words
        self._format, self._rate_hz = audio
        if key:
            self.headers["authorization"] = f"Bearer {key}"
        if trace:
            self.headers["traceparent"] = trace
        self._connect(gateway)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, text: str) -> bytes:
        """Says a text, and returns its audio."""
        self.error = self.end_reason = ""
        self.begin(text)
        return b"".join(self.pieces())

    @abstractmethod
    def _connect(self, gateway: GatewayRig) -> None: ...

    @abstractmethod
    def begin(self, text: str) -> None:
        """Sends a text of one sentence."""

    @abstractmethod
    def pieces(self) -> Iterator[bytes]:
        """Yields the audio of the text."""

    @abstractmethod
    def close(self) -> None:
        """Disconnects."""

    def cancel(self) -> None:
        """Cancels the text, and keeps the connection. Clients of plain HTTP can only leave."""
        raise NotImplementedError

    def report_played(self, milliseconds: int) -> None:
        """Reports the played audio of a text that has ended, and reads the heard text. A session
        can.
        """
        raise NotImplementedError


class Http(Line):
    """Audio over HTTP."""

    def _fields(self) -> dict[str, Any]:
        """Returns the fields of a request in addition to its text."""
        return {}

    def _connect(self, gateway: GatewayRig) -> None:
        self._http = gateway.http(headers=self.headers)

    def begin(self, text: str) -> None:
        request = self._http.build_request(
            "POST",
            "/v1/audio/speech",
            json=body(
                input=text,
                voice=self._voice,
                response_format=self._format,
                sample_rate=self._rate_hz,
                **self._fields(),
            ),
        )
        self._response = self._http.send(request, stream=True)
        if self._response.status_code != httpx.codes.OK:
            self._response.read()
            self.error = self._response.json()["error"]["message"]
        self.end_reason = self._response.headers.get("x-end-reason", "")

    def pieces(self) -> Iterator[bytes]:
        if not self.error:
            yield from self._response.iter_bytes()

    def close(self) -> None:
        self._http.close()


class WholeFile(Http):
    """Whole file over HTTP."""

    def _fields(self) -> dict[str, Any]:
        return {"stream": False}


class Events(Http):
    """Audio as events of a stream over HTTP."""

    has_words = True

    def _fields(self) -> dict[str, Any]:
        return {"stream_format": "sse", "word_timestamps": self._words}

    def pieces(self) -> Iterator[bytes]:
        self.times = []
        for event in [] if self.error else events_of(self._response.iter_lines()):
            if event["type"] == "speech.audio.delta":
                yield base64.b64decode(event["audio"])
                self.times += times_of(event)
                for segment in event.get("segments", ()):
                    self.spoken = segment["text"]
            elif event["type"] == "speech.audio.error":
                self.error = event["error"]["message"]
            self.end_reason = event.get("end_reason", "")


class Socket(Line):
    """WebSocket for text in pieces.

    Attributes:
        cancelled: whether the gateway has said that the last text was cancelled.
    """

    has_words = True
    cancelled = False

    def _connect(self, gateway: GatewayRig) -> None:
        self._socket = connect(
            address(gateway),
            additional_headers=self.headers,
            open_timeout=PATIENCE_SECONDS,
            close_timeout=1,
            max_queue=1,  # so that a client that does not read takes no messages
        )
        audio = {"response_format": self._format, "sample_rate": self._rate_hz}
        usual = CONFIG | {"voice": self._voice}
        self._send(**usual, **audio, word_timestamps=self._words)

    def _send(self, **message: Any) -> None:
        with suppress(ConnectionClosed):  # the error of a refusal is received later
            self._socket.send(json.dumps(message))

    def begin(self, text: str) -> None:
        self._send(type="input.text", text=f"{text}\n")

    def cancel(self) -> None:
        self._send(type="cancel")

    def report_played(self, milliseconds: int) -> None:
        self._send(type="cancel", played_ms=milliseconds)
        assert not b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        kind, self.times = "", []
        while kind not in ("audio.done", "audio.cancelled"):
            try:
                message = self._socket.recv(timeout=PATIENCE_SECONDS)
            except ConnectionClosed as closed:
                self.error = self.error or f"connection: {closed}"
                return
            if isinstance(message, bytes):
                yield message
                continue
            event = json.loads(message)
            kind = event["type"]
            if kind == "audio.chunk":
                yield base64.b64decode(event["audio_b64"])
                self.times += times_of(event)
            elif kind == "audio.start":
                self.spoken = event["sentence_text"]
            elif kind == "audio.done":
                assert event["error"] == bool(self.error)
            elif kind == "audio.cancelled":
                self.heard = event["heard_text"]
            if kind == "error":
                self.error = event["message"]
            self.end_reason = event.get("end_reason", "")
        self.cancelled = kind == "audio.cancelled"

    def close(self) -> None:
        self._socket.close()


class Realtime(Line):
    """OpenAI's Realtime interface, with OpenAI's package."""

    def _connect(self, gateway: GatewayRig) -> None:
        options: Any = {
            "open_timeout": PATIENCE_SECONDS,
            "max_queue": 1,
            "sock": _bounded_socket(gateway),
        }
        headers = dict(self.headers)
        key = headers.pop("authorization", "Bearer none").removeprefix("Bearer ")
        self._openai = OpenAI(base_url=f"{gateway.url}/v1", api_key=key)
        self._connection = self._openai.realtime.connect(
            model="gpt-realtime", extra_headers=headers, websocket_connection_options=options
        ).enter()
        # OpenAI shows a rate of `audio/pcm` only.
        rate = {"rate": self._rate_hz} if self._format == "pcm" else {}
        output: Any = {
            "format": {"type": f"audio/{self._format}", **rate},
            "voice": self._voice,
        }
        self._response: Any = {"audio": {"output": output}}

    def begin(self, text: str) -> None:
        self._text = text
        content: Any = [{"type": "input_text", "text": text}]
        item: Any = {"type": "message", "role": "user", "content": content}
        with suppress(ConnectionClosed):  # the error of a refusal is received later
            self._connection.conversation.item.create(item=item)
            self._connection.response.create(response=self._response)

    def cancel(self) -> None:
        self._connection.response.cancel()

    def report_played(self, milliseconds: int) -> None:
        self._connection.conversation.item.truncate(
            item_id=self._item, content_index=0, audio_end_ms=milliseconds
        )
        event: Any = self._connection.recv()
        assert event.type == "conversation.item.truncated"
        self.heard = event.transcript

    def pieces(self) -> Iterator[bytes]:
        while True:
            event: Any = self._connection.recv()
            if event.type == "response.output_audio.delta":
                yield base64.b64decode(event.delta)
            elif event.type == "error":
                self.error = event.error.message
                return
            elif event.type == "response.done":
                response = event.response
                self._item = response.output[0].id
                self.spoken = response.output[0].content[0].transcript
                if response.status == "failed":
                    self.error = response.status_details.error.message
                elif response.status == "cancelled":
                    self.heard = response.status_details.heard
                elif response.status == "incomplete":
                    reason = response.status_details.reason
                    assert self.spoken
                    assert self._text.startswith(self.spoken)
                    self.end_reason = {"max_output_tokens": "length"}.get(reason, reason)
                return

    def close(self) -> None:
        self._connection.close()
        self._openai.close()


class Riva(Line):
    """gRPC interface of Riva, with NVIDIA's package."""

    has_words = True

    _call: Any

    def _connect(self, gateway: GatewayRig) -> None:
        metadata = [list(header) for header in self.headers.items()]
        self._service = riva.client.SpeechSynthesisService(
            riva.client.Auth(
                uri=gateway.riva,
                metadata_args=metadata,
                # Without the probe, gRPC's window for a call that is not read has a fixed size.
                options=[("grpc.http2.bdp_probe", 0)],
            )
        )

    def begin(self, text: str) -> None:
        self._call = self._service.synthesize_online(text, **self._options())

    def _options(self) -> dict[str, Any]:
        return {
            "voice_name": self._voice,
            "encoding": _ENCODINGS[self._format],
            "sample_rate_hz": self._rate_hz,
            "enable_word_time_offsets": self._words,
        }

    def _responses(self) -> Iterator[Any]:
        return iter(self._call)

    def cancel(self) -> None:
        self._call.cancel()

    def pieces(self) -> Iterator[bytes]:
        self.times = []
        try:
            for piece in self._responses():
                yield piece.audio
                self.spoken = piece.meta.processed_text or self.spoken
                words = piece.meta.words
                self.times += [(word.word, word.start_time, word.end_time) for word in words]
        except grpc.RpcError:
            self.error = self._call.details()
        self.end_reason = dict(self._call.trailing_metadata() or ()).get("end-reason", "")

    def close(self) -> None:
        self._service.auth.channel.close()


class WholeRiva(Riva):
    """Whole audio of a text over gRPC."""

    def begin(self, text: str) -> None:
        self._call = self._service.synthesize(text, future=True, **self._options())

    def _responses(self) -> Iterator[Any]:
        yield self._call.result()


def _bounded_socket(gateway: GatewayRig) -> socket.socket:
    """Connects to a gateway, and bounds what the operating system receives ahead of the client.

    Otherwise Linux takes several megabytes for a client that has read a large message fast.
    """
    url = urlsplit(gateway.url)
    opened = socket.create_connection((url.hostname or "", url.port or 0), PATIENCE_SECONDS)
    opened.settimeout(None)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVED_BYTES)
    return opened


def times_of(event: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Returns the words of an event with their times."""
    words = event.get("timestamps") or []
    return [(word["word"], word["start_ms"], word["end_ms"]) for word in words]


DOORS: dict[str, type[Line]] = {
    "whole file": WholeFile,
    "http": Http,
    "events": Events,
    "socket": Socket,
    "realtime": Realtime,
    "riva": Riva,
    "whole riva": WholeRiva,
}
