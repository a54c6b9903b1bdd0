"""Bodies of requests: mistakes in lists of codes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from token2wav_gateway.requests import StageRequest, problem


@pytest.mark.parametrize(
    "codes", [[5, "x"], ["x"], [None], [True], [1.0], [[1], 2], [[1], ["x"]], 7]
)
@pytest.mark.parametrize("form", ["codes", "stage_output"])
def test_one_mistake_is_reported_for_any_number_of_wrong_codes(codes: Any, form: str) -> None:
    if isinstance(codes, list):
        codes = codes * 1000
    content = codes if form == "codes" else {"codes": {"audio": codes}}
    with pytest.raises(ValidationError) as caught:
        StageRequest.model_validate({form: content})
    assert caught.value.error_count() == 1
    field, message = problem(list(caught.value.errors()))
    assert field == form
    assert message.endswith("must be a list of integers, or a list of lists of integers")


def test_codes_are_needed() -> None:
    with pytest.raises(ValidationError, match="a code is needed"):
        StageRequest.model_validate({"codes": []})


@pytest.mark.parametrize("codes", [[5, 6], [[5], [6]], [[5, 6], [7, 8]]])
def test_codes_are_tokens_or_frames(codes: list[Any]) -> None:
    assert StageRequest.model_validate({"codes": codes}).codes == codes
