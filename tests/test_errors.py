"""Errors keep their class and text between processes."""

from __future__ import annotations

import pickle

from token2wav.errors import InputError


def test_an_input_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(InputError("tokens", "none given")))
    assert isinstance(error, InputError)
    assert (str(error), error.field) == ("tokens: none given", "tokens")
