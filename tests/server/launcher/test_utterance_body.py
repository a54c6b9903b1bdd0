"""Body of an utterance over HTTP: each fault has a sentence that names the field."""

from __future__ import annotations

import json

import numpy as np
import pytest

from token2wav_server.launcher.utterance_body import problem_of


def tensor(**change: object) -> dict[str, object]:
    return {"name": "count", "shape": [1, 2], "datatype": "INT32", "data": [[3, 4]], **change}


@pytest.mark.parametrize(
    "body",
    [
        {
            "tokens": [0, 2**31 - 1, -(2**31)],
            "prompt_tokens": 5,
            "prompt_mel": [-1.5, 2, 1e-3],
            "steps": 3,
            "voice_id": [0, 255],
            "voice": "änna",
        },
        {"inputs": [tensor(), tensor(data=[3, 4])]},
        {"inputs": [tensor(shape=[3, 2, 1], data=[[[1], [2]], [[3], [4]], [[5], [6]]])]},
        {"inputs": [tensor(shape=[0, 2], data=[]), tensor(datatype="FP32", data=[[0.5, -1]])]},
        {"inputs": [tensor(datatype="BYTES", shape=[1], data=["a: b"])]},
    ],
)
def test_utterances_and_tensors_pass(body: dict[str, object]) -> None:
    assert problem_of(json.dumps(body).encode()) == ""


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        (5, "inputs: not a list"),
        ([5], "inputs: each input must be an object with a name"),
        ([{}], "inputs: each input must be an object with a name"),
        ([tensor(shape=None)], "count: the shape null is not a list of sizes"),
        ([tensor(shape=[-1, 2])], "count: the shape [-1, 2] is not a list of sizes"),
        ([tensor(shape=[2**40])], "count: the shape [1099511627776] is not a list of sizes"),
        ([tensor(shape=[1, 3])], "count: the shape [1, 3] does not fit 2 values"),
        ([tensor(data=None)], "count: the shape [1, 2] does not fit 1 values"),
        (
            [tensor(shape=[2, 2], data=[[1, 2, 3], [4]])],
            "count: rows of different lengths, or of another shape than [2, 2]",
        ),
        ([tensor(shape=[4], data=[[1, 2], [3, 4]])], "count: rows of different lengths, or of"),
        ([tensor(data=[3, [4]])], "count: rows of different lengths"),
        ([tensor(data=[[3, 2**31]])], "count: 2147483648 is not an integer from"),
        ([tensor(data=[3, "4"])], 'count: "4" is not an integer from'),
    ],
)
def test_faults_of_tensors(inputs: object, problem: str) -> None:
    assert problem_of(json.dumps({"inputs": inputs}).encode()).startswith(problem)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            b'{"tokens":[4294967297]}',
            "tokens: 4294967297 is not an integer from -2147483648 to 2147483647",
        ),
        (b'{"tokens":[1,2147483648]}', "tokens: 2147483648 is not an integer from"),
        (b'{"tokens":-2147483649}', "tokens: -2147483649 is not an integer from"),
        (b'{"tokens":[1.5]}', "tokens: 1.5 is not an integer"),
        (b'{"tokens":[1e3]}', "tokens: 1000.0 is not an integer"),
        (b'{"tokens":[true]}', "tokens: true is not an integer"),
        (b'{"tokens":[null]}', "tokens: null is not an integer"),
        (b'{"tokens":["1"]}', 'tokens: "1" is not an integer'),
        (b'{"tokens":[[1,2]]}', "tokens: [1, 2] is a list; expected one flat list of integers"),
        (b'{"delays":[0,1]}', "delays: [0, 1] is not a text of integers such as '0,1,2'"),
        (b'{"parameters":{"delays":[0]}}', "delays: [0] is not a text of integers"),
        (b'{"prompt_tokens":[4294967297]}', "prompt_tokens: 4294967297 is not"),
        (b'{"voice_id":[256]}', "voice_id: 256 is not an integer from 0 to 255"),
        (
            b'{"tokens":[1],"tokens":[2]}',
            'the body is not valid JSON: the name "tokens" appears more than once',
        ),
        (b'{"sequence_id":5}', "sequence_id: not allowed over HTTP"),
        (b'{"prompt_mel":[NaN]}', "the body is not valid JSON: NaN is not a JSON number"),
        (b'{"tokens":[1', "the body is not valid JSON: Expecting ',' delimiter"),
        (b'{"tokens":[1]} x', "the body is not valid JSON: Extra data"),
        (b"\xff\xfe", "the body is not valid JSON: 'utf-8' codec"),
        ('{"tokens":[1]}'.encode("utf-16"), "the body is not valid JSON: 'utf-8' codec"),
        (b"[1]", "the body is not a JSON object"),
        (b"null", "the body is not a JSON object"),
        (b"[" * 33, "the body has more than 32 brackets"),
    ],
)
def test_faults(body: bytes, problem: str) -> None:
    assert problem_of(body).startswith(problem)


def test_a_number_of_a_million_digits_is_refused_at_once() -> None:
    problem = problem_of(b'{"tokens":[' + b"9" * 1_000_000 + b"]}")
    assert problem == f"tokens: {'9' * 20} is not an integer from -2147483648 to 2147483647"


def test_messages_are_short_for_any_body() -> None:
    assert len(problem_of(json.dumps({"tokens": ["x" * 100_000]}).encode())) < 200
    assert len(problem_of(b'{"tokens":' + str(list(np.arange(5.5, 1000))).encode() + b"}")) < 200
