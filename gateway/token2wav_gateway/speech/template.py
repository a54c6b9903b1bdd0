"""Templates: how text and voice become a prompt, and how speech tokens are read from the answer.

A template is a YAML file. The folder `templates` has one for each language model that is known; a
template for another model is a file, without code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

from token2wav_gateway.settings import Section, SettingsError, read_yaml, validated
from token2wav_gateway.speech.content import Text
from token2wav_gateway.speech.frames import Frames

_FOLDER = Path(__file__).with_name("templates")
_FIELDS = {"text", "instructions", "voice", "language", "prompt_text", "prompt_tokens"}
_GATEWAY_FIELDS = {"messages", "model", "prompt", "stream"}  # set in each request
_NUMBER = "{number}"
_DIGITS = 9  # of a token
_METADATA = "cosyvoice3_metadata.json"  # which the public converter of CosyVoice3 writes


def _known_fields(content: str) -> str:
    """Checks that braces contain fields of the prompt only."""
    for _, field, form, conversion in Formatter().parse(content):
        if field is not None and field not in _FIELDS:
            raise ValueError(f"{{{field}}} is not one of {', '.join(sorted(_FIELDS))}")
        if form or conversion:
            raise ValueError(f"{{{field}}} must contain the name of the field alone")
    return content


PromptText: TypeAlias = Annotated[str, AfterValidator(_known_fields)]


class Message(Section):
    """Message of a chat. `content` may contain the fields of the prompt in braces."""

    role: str
    content: PromptText


class Template(Section):
    """Template of a language model.

    Attributes:
        description: models that the template is for.
        messages: messages of a chat; then the gateway calls `/chat/completions`.
        prompt: text to continue; then the gateway calls `/completions`. A template has either
            `messages` or `prompt`. Both may contain `{text}`, `{instructions}`, `{voice}`,
            `{language}`, `{prompt_text}` and `{prompt_tokens}`.
        default_instructions: text of `{instructions}` if the client sends none.
        token: text of a speech token, with `{number}` in place of its number.
        offset: number of the first speech token, in the text or among the ids.
        codebooks: number of codes of a frame; 1 for a model that emits one token at a time.
        codebook_offset: number that is added to the codes of each further codebook.
        stop_from: number, after `offset` was subtracted, from which on each number ends the speech;
            None for a model whose server ends the answer itself.
        padding: numbers, after `offset` was subtracted, that the model sends between speech tokens.
        read: whether tokens are read from the text of the answer, or from the token ids that vLLM
            sends if the request has `return_token_ids`.
        text: `stream` if the server takes further text while it answers: the body of the request is
            then a JSON object in a line, and a line `{"text": " more"}` for each further piece.
        request: further fields of the request, such as sampling parameters.
    """

    description: str = ""
    messages: tuple[Message, ...] = ()
    prompt: PromptText | None = None
    default_instructions: str = ""
    token: str
    offset: Annotated[int, Field(ge=0)] = 0
    codebooks: Annotated[int, Field(ge=1, le=64)] = 1
    codebook_offset: Annotated[int, Field(ge=0)] = 0
    stop_from: Annotated[int | None, Field(ge=0)] = None
    padding: tuple[int, ...] = ()
    read: Literal["text", "token_ids"] = "text"
    text: Literal["whole", "stream"] = "whole"
    request: dict[str, JsonValue] = Field(default_factory=dict)

    @field_validator("token")
    @classmethod
    def _has_number(cls, token: str) -> str:
        if token.count(_NUMBER) != 1:
            raise ValueError(f"must contain {_NUMBER} once")
        return token

    @field_validator("request")
    @classmethod
    def _of_the_template(cls, request: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if conflicts := _GATEWAY_FIELDS & request.keys():
            raise ValueError(f"{min(conflicts)} is set by the gateway")
        return request

    @model_validator(mode="after")
    def _one_prompt(self) -> Template:
        if bool(self.messages) == (self.prompt is not None):
            raise ValueError("needs either messages or prompt")
        return self

    @property
    def path(self) -> str:
        """Path of the request below the base URL."""
        return "chat/completions" if self.messages else "completions"

    def body(self, model: str, text: Text) -> dict[str, Any]:
        """Returns the body of the request for a text.

        The sampling of the text replaces fields of `request`. A larger `max_tokens` changes
        nothing.

        Args:
            model: name that the server gives to the model.
        """
        offset = self.offset if self.read == "text" else 0
        voice, instructions, sampling = text.voice, text.instructions, text.sampling
        numbers = voice.tensors.prompt_tokens if voice.tensors else ()
        values = {
            "text": text.text,
            "instructions": self.default_instructions if instructions is None else instructions,
            "voice": voice.name,
            "language": text.language,
            "prompt_text": voice.text,
            "prompt_tokens": "".join(
                self.token.replace(_NUMBER, str(number + offset)) for number in numbers
            ),
        }
        content: dict[str, Any] = (
            {"prompt": self.prompt.format_map(values)}
            if self.prompt is not None
            else {
                "messages": [
                    {"role": message.role, "content": message.content.format_map(values)}
                    for message in self.messages
                ]
            }
        )
        request = {**self.request, **sampling}
        if isinstance(longest := self.request.get("max_tokens"), int):
            request["max_tokens"] = min(longest, sampling.get("max_tokens", longest))
        return {**request, **content, "model": model, "stream": True}

    def is_shortened(self, sampling: Mapping[str, float]) -> bool:
        """Returns whether a client asks for fewer tokens than this template allows."""
        longest, asked = self.request.get("max_tokens"), sampling.get("max_tokens")
        return asked is not None and (not isinstance(longest, int) or asked < longest)


def load_template(name: str, model_folder: Path | None = None) -> Template:
    """Loads a template of the package by its name, or any template by its path.

    Args:
        model_folder: folder of the language model, whose metadata replace the `offset` of a
            template that reads token ids; None for none.

    Raises:
        SettingsError: the template or the metadata do not exist, or a value is unknown or wrong.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = _FOLDER / f"{name}.yaml"
        if "/" in name or not path.is_file():
            known = ", ".join(sorted(file.stem for file in _FOLDER.glob("*.yaml")))
            raise SettingsError(
                f"language_model.template: {name!r} is not one of {known}, and no .yaml file"
            )
    template = validated(Template, read_yaml(path), path)
    if model_folder is None:
        return template
    if template.read != "token_ids":
        raise SettingsError(
            f"language_model.folder: not for the template {name!r}, which reads no token ids"
        )
    return template.model_copy(update={"offset": _speech_token_offset(model_folder / _METADATA)})


def _speech_token_offset(path: Path) -> int:
    """Reads the id of the first speech token from a file of CosyVoice3's converter."""
    try:
        offset = json.loads(path.read_text(encoding="utf-8"))["speech_token_offset"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no speech_token_offset in JSON"
        raise SettingsError(f"language_model.folder: {path}: {reason}") from None
    if type(offset) is not int or offset < 0:
        raise SettingsError(
            f"language_model.folder: {path}: speech_token_offset is no integer of at least 0"
        )
    return offset


class TokenReader:
    """Reader of the speech tokens in an answer that arrives in pieces.

    Args:
        vocabulary: number of different tokens, or of the codes of each codebook; () if it is
            unknown.

    Attributes:
        ended: whether a number has ended the speech. The reader ignores all numbers after it.
        skipped: numbers that became no token: `padding`, and those of `Frames.skipped`.
    """

    def __init__(self, template: Template, vocabulary: Sequence[int] = ()) -> None:
        self._template = template
        self._frames = Frames(template.codebooks, template.codebook_offset, vocabulary)
        self.skipped = self._frames.skipped
        self.ended = False
        prefix, suffix = (re.escape(part) for part in template.token.split(_NUMBER))
        # A plain number is complete only when another character follows.
        end = suffix or "(?=[^0-9])"
        start = prefix or "(?<![0-9])"
        self._pattern = re.compile(f"{start}([0-9]{{1,{_DIGITS}}}){end}")
        self._longest = len(template.token) + _DIGITS
        self._text = ""

    def feed(self, text: str) -> NDArray[np.int32]:
        """Returns the tokens that a piece of text completes: (n,), or (n, codebooks)."""
        self._text += text
        matches = list(self._pattern.finditer(self._text))
        # The text after the last token may be the beginning of another token.
        self._text = self._text[matches[-1].end() if matches else 0 :][-self._longest :]
        return self._tokens(int(match[1]) for match in matches)

    def feed_ids(self, ids: list[int]) -> NDArray[np.int32]:
        """Returns the tokens of ids, in the shape that `feed` returns."""
        return self._tokens(iter(ids))

    def close(self) -> NDArray[np.int32]:
        """Ends the answer, and returns the tokens that the end completes."""
        return self.feed("\n")

    def _tokens(self, numbers: Iterator[int]) -> NDArray[np.int32]:
        template, frames = self._template, list[list[int]]()
        for number in numbers:
            code = number - template.offset
            self.ended = self.ended or (
                template.stop_from is not None and code >= template.stop_from
            )
            if self.ended:
                break
            if code in template.padding:
                self.skipped["padding"] += 1
            elif code < 0 and template.read == "token_ids":
                continue  # an id of text
            elif (frame := self._frames.add(code)) is not None:
                frames.append(frame)
        tokens = np.array(frames, np.int32).reshape(-1, template.codebooks)
        return tokens[:, 0] if template.codebooks == 1 else tokens
