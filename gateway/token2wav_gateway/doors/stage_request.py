"""Body of `POST /v1/stage/run`: speech tokens, or codes of a codec, without a text."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    SkipValidation,
    model_validator,
)

from token2wav_gateway.doors.requests import AudioFields, Words
from token2wav_gateway.forms import matching


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


class StageRequest(AudioFields):
    """Body of `POST /v1/stage/run`: speech tokens, or codes of a codec. The default format is wav.

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
        stream: whether audio is sent in pieces as soon as possible; else as one body with a length.
    """

    codes: Codes | None = None
    stage_output: StageOutput | None = None
    finished: bool | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    request_id: (
        Annotated[str, matching(r"[!-~]{1,128}", "1 to 128 visible characters of ASCII")] | None
    ) = None
    voice: Words | None = None
    stream: bool = False

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
