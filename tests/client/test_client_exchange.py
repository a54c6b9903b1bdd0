"""An utterance over several attempts: what is sent again, and what of the answer is new."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from token2wav_client import ClientVoice, UtteranceClosedError
from token2wav_client.audio import AudioChunk
from token2wav_client.exchange import Exchange
from token2wav_client.wire import Opening

SAMPLES = np.arange(960 * 10, dtype=np.int16)


@pytest.fixture
def exchange(voice_arrays: dict[str, Any]) -> Exchange:
    opening = Opening(ClientVoice(**voice_arrays), "int16", keep_open=True)
    return Exchange("token2wav", opening, repeatable=True)


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


def test_audio_that_was_delivered_is_not_delivered_again(exchange: Exchange) -> None:
    """However the next server cuts it."""
    exchange.request(np.arange(10), 100.0, end=True)
    first = [taken(exchange.accept(response(index, index, index + 1), 101.0)) for index in range(4)]
    exchange.interrupt()
    exchange.again(105.0)
    assert exchange.accept(response(0, 0, 3), 106.0) is None
    rest = [
        taken(exchange.accept(response(1, 3, 6), 107.0)),
        taken(exchange.accept(response(2, 6, 10, final=True), 108.0)),
    ]
    assert np.array_equal(np.concatenate([chunk.audio for chunk in first + rest]), SAMPLES)
    assert [chunk.index for chunk in first + rest] == [0, 1, 2, 3, 4, 5]
    assert [len(chunk.audio) for chunk in rest] == [2 * 960, 4 * 960]
    assert [chunk.arrival_s for chunk in rest] == [7.0, 8.0]  # since the first tokens of all
    assert [chunk.gap_s for chunk in rest] == [6.0, 1.0]
    assert exchange.complete


def test_a_final_chunk_is_delivered_though_nothing_in_it_is_new(exchange: Exchange) -> None:
    exchange.request([1, 2], 0.0, end=False)
    exchange.accept(response(0, 0, 2), 1.0)
    exchange.again(2.0)
    exchange.request([], 3.0, end=True)
    last = taken(exchange.accept(response(0, 0, 2, final=True), 4.0))
    assert (len(last.audio), last.final) == (0, True)


def test_another_attempt_says_the_same_under_another_id(exchange: Exchange) -> None:
    before = [exchange.request(tokens, 0.0, end=False) for tokens in ([], [1, 2], [3])]
    exchange.interrupt()
    before.append(exchange.request([4], 1.0, end=True))  # meanwhile
    after = exchange.again(2.0)
    assert [request.raw_input_contents for request in after] == [request.raw_input_contents for request in before]
    assert [request.id for request in after] == ["0", "1", "2", "3"]
    [old], [new] = ({request.parameters["sequence_id"].string_param for request in side} for side in (before, after))
    assert old != new == exchange.id
    assert [request.parameters["sequence_end"].bool_param for request in after] == [False, False, False, True]
    with pytest.raises(UtteranceClosedError):
        exchange.request([5], 3.0, end=False)


def test_nothing_is_owed_between_attempts(exchange: Exchange) -> None:
    exchange.request([1], 1.0, end=True)
    assert exchange.owed_since == 1.0
    exchange.interrupt()
    assert exchange.owed_since is None
    exchange.again(5.0)
    assert exchange.owed_since == 5.0
