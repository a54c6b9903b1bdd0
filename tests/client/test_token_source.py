"""Tokens from files and pipes: all formats agree, pipes are never waited for longer than needed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from token2wav_client.errors import TokenError
from token2wav_client.token_source import batches, open_tokens, paced

TOKENS = [3, 1, 4, 1, 5926]


def write(path: Path) -> str:
    if path.suffix == ".npy":
        np.save(path, np.array(TOKENS, np.int64))
    elif path.suffix == ".json":
        path.write_text(json.dumps(TOKENS))
    elif path.stem == "plain":
        path.write_text("3 1 4\n1 5926")
    else:
        path.write_text("".join(f"<|s_{token}|>" for token in TOKENS))
    return str(path)


@pytest.mark.parametrize("name", ["t.npy", "t.json", "plain.txt", "brackets.txt", "no_suffix"])
def test_every_format_gives_the_same_tokens(tmp_path: Path, name: str) -> None:
    source = open_tokens(write(tmp_path / name))
    assert [token for piece in source.pieces for token in piece] == TOKENS
    assert source.count == (len(TOKENS) if name.endswith((".npy", ".json")) else None)


def test_a_pipe_gives_its_tokens_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    try:
        pieces = open_tokens(str(path)).pieces
        os.write(writer, b"<|s_1|><|s_2")
        assert next(pieces) == [1]
        os.write(writer, b"3|><|s_4|>")
        assert next(pieces) == [23, 4]
    finally:
        os.close(writer)
    assert list(pieces) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.json", b"{", "cannot read"),
        ("t.json", b'{"tokens": [1]}', "expected a JSON list of integers"),
        ("t.json", b"[1, true]", "expected a JSON list of integers"),
        ("t.json", b"[1, 2.0]", "expected a JSON list of integers"),
        ("t.json", b"[-1]", "-1 is outside"),
        ("t.json", b"[[1, 2], [3]]", "tokens:"),
        ("t.json", b'[[1, 2], "3"]', "tokens:"),
        ("t.json", b'[["1"]]', "tokens:"),
        ("t.txt", b"1 2 three", "'three' at byte 4"),
        ("t.txt", b"<|s_1|><|s_", "ends inside"),
    ],
)
def test_an_unusable_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenError, match=message) as caught:
        list(open_tokens(str(tmp_path / name)).pieces)
    assert str(tmp_path / name) in str(caught.value)


def test_arrays_of_any_order_and_byte_order_are_read(tmp_path: Path) -> None:
    codes = np.array([[1, 2, 3], [4, 5, 6]])
    for array in (
        codes,
        np.asfortranarray(codes),
        codes.astype(">i2"),
        codes.astype("<u4"),
        codes[:0],
    ):
        np.save(tmp_path / "t.npy", array)
        [tokens] = open_tokens(str(tmp_path / "t.npy")).pieces
        assert tokens == array.tolist()


def test_skipped_text_is_logged_once_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(b"\xef\xbb\xbf<|s_1|><|endofprompt|>2\n")
    assert [token for piece in open_tokens(str(path)).pieces for token in piece] == [1, 2]
    assert caplog.messages == [
        f"{path}: skipped 2 special tokens that are not speech tokens; the first is "
        "a byte-order mark"
    ]


def test_batches_are_cut_but_never_filled_across_pieces() -> None:
    assert list(batches([[1, 2, 3, 4, 5], [6], [7, 8]], 2)) == [[1, 2], [3, 4], [5], [6], [7, 8]]


def test_a_batch_is_not_waited_for_by_asking_the_source_ahead() -> None:
    asked: list[int] = []

    def source() -> Iterator[list[int]]:
        for token in range(3):
            asked.append(token)
            yield [token]

    stream = batches(source(), 5)
    assert next(stream) == [0]
    assert asked == [0]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_batch_is_due_with_its_last_token() -> None:
    clock = Clock()
    due = [clock.now for _ in paced([[0] * 5, [0] * 5, [0]], 25.0, clock=clock, sleep=clock.sleep)]
    assert due == pytest.approx([100.2, 100.4, 100.44])


def test_a_slow_source_is_not_held_back() -> None:
    clock = Clock()

    def source() -> Iterator[list[int]]:
        for _ in range(3):
            clock.sleep(1.0)
            yield [0]

    due = [clock.now for _ in paced(source(), 25.0, clock=clock, sleep=clock.sleep)]
    assert due == pytest.approx([101.0, 102.0, 103.0])


CODES = [[1, 2, 3], [4, 5, 6]]


def test_tokens_of_several_codes_from_arrays_and_json(tmp_path: Path) -> None:
    np.save(tmp_path / "codes.npy", np.array(CODES))
    (tmp_path / "codes.json").write_text(json.dumps(CODES))
    for name in ("codes.npy", "codes.json"):
        source = open_tokens(str(tmp_path / name))
        assert source.count == 2
        assert [list(batch) for batch in batches(source.pieces, 1)] == [[[1, 2, 3]], [[4, 5, 6]]]


@pytest.mark.parametrize(
    "text", ["1 2 3 4 5 6", "1,2\n3,4\n5,6\n", "<|s_1|><|s_2|><|s_3|><|s_4|><|s_5|><|s_6|>"]
)
def test_codes_in_text_follow_one_another(tmp_path: Path, text: str) -> None:
    path = tmp_path / "codes.txt"
    path.write_text(text)
    assert [token for piece in open_tokens(str(path), 3).pieces for token in piece] == CODES
    with pytest.raises(
        TokenError,
        match=r"codes\.txt: tokens: the text ends after 2 of the 4 codes of its last token",
    ):
        list(open_tokens(str(path), 4).pieces)
