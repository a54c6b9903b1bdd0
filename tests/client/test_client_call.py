"""An utterance over several attempts: what is sent again, and what of the answer is new."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from token2wav_client import ClientVoice, UtteranceClosedError
from token2wav_client.audio import AudioChunk
from token2wav_client.call import Call
from token2wav_client.wire import Opening

SAMPLES = np.arange(960 * 10, dtype=np.int16)


@pytest.fixture
def call(voice_arrays: dict[str, Any]) -> Call:
    opening = Opening(ClientVoice(**voice_arrays), "int16", keep_open=True)
    return Call("token2wav", opening, repeatable=True)


def response(index: int, begin: int, end: int, *, final: bool = False) -> Any:
    """Tokens `begin` to `end` as samples that tell where they lie."""
    outputs: dict[str, np.ndarray[Any, np.dtype[Any]]] = {
        "audio": SAMPLES[960 * begin : 960 * end],
        "chunk_index": np.array([index], np.int32),
        "final": np.array([final]),
    }
    types = {"int16": "INT16", "int32": "INT32", "bool": "BOOL"}
    message = service_pb2.ModelInferResponse(id="0")
    message.parameters["triton_final_response"].bool_param = final
    for name, array in outputs.items():
        message.outputs.add(name=name, datatype=types[array.dtype.name], shape=array.shape)
        message.raw_output_contents.append(array.tobytes())
    return service_pb2.ModelStreamInferResponse(infer_response=message)


def taken(chunk: AudioChunk | None) -> AudioChunk:
    assert chunk is not None
    return chunk


def test_audio_that_was_delivered_is_not_delivered_again(call: Call) -> None:
    """However the next server cuts it."""
    call.request(np.arange(10), 100.0, end=True)
    first = [taken(call.accept(response(index, index, index + 1), 101.0)) for index in range(4)]
    call.interrupt()
    call.again(105.0)
    assert call.accept(response(0, 0, 3), 106.0) is None
    rest = [
        taken(call.accept(response(1, 3, 6), 107.0)),
        taken(call.accept(response(2, 6, 10, final=True), 108.0)),
    ]
    assert np.array_equal(np.concatenate([chunk.audio for chunk in first + rest]), SAMPLES)
    assert [chunk.index for chunk in first + rest] == [0, 1, 2, 3, 4, 5]
    assert [len(chunk.audio) for chunk in rest] == [2 * 960, 4 * 960]
    assert [chunk.arrival_s for chunk in rest] == [7.0, 8.0]  # since the first tokens of all
    assert [chunk.gap_s for chunk in rest] == [6.0, 1.0]
    assert call.state.complete


def test_a_final_chunk_is_delivered_though_nothing_in_it_is_new(call: Call) -> None:
    call.request([1, 2], 0.0, end=False)
    call.accept(response(0, 0, 2), 1.0)
    call.again(2.0)
    call.request([], 3.0, end=True)
    last = taken(call.accept(response(0, 0, 2, final=True), 4.0))
    assert (len(last.audio), last.final) == (0, True)


def test_another_attempt_says_the_same_under_another_id(call: Call) -> None:
    before = [call.request(tokens, 0.0, end=False) for tokens in ([], [1, 2], [3])]
    call.interrupt()
    before.append(call.request([4], 1.0, end=True))  # meanwhile
    after = call.again(2.0)
    assert [request.raw_input_contents for request in after] == [request.raw_input_contents for request in before]
    assert [request.id for request in after] == ["0", "1", "2", "3"]
    [old], [new] = ({request.parameters["sequence_id"].string_param for request in side} for side in (before, after))
    assert old != new == call.id
    assert [request.parameters["sequence_end"].bool_param for request in after] == [False, False, False, True]
    with pytest.raises(UtteranceClosedError):
        call.request([5], 3.0, end=False)


def test_nothing_is_owed_between_attempts(call: Call) -> None:
    call.request([1], 1.0, end=True)
    assert call.owed_since == 1.0
    call.interrupt()
    assert call.owed_since is None
    call.again(5.0)
    assert call.owed_since == 5.0
