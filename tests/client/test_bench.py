"""Benchmark of a server: figures of a row, tokens, files of recordings, and the command's messages.

`with_server/test_bench_command.py` runs it against a server.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from token2wav.commands import main
from token2wav_client.bench import Tokens, as_tables, figures
from token2wav_client.listening import Recording, record

RATE = 8000
PIECE = np.zeros(800, np.int16)  # 100 ms


def utterance(
    *arrivals_ms: int, ended_ms: int, began_ms: int = 0, cut: bool = False, error: str = ""
) -> Recording:
    return record(
        [(arrival / 1000, PIECE) for arrival in arrivals_ms],
        RATE,
        ended_ms / 1000,
        complete=not (cut or error),
        began_s=began_ms / 1000,
        error=error,
    )


# Two complete utterances, the second with a stall of 150 ms, one that was cut, one that failed.
ROW = [
    utterance(100, 200, 250, ended_ms=260),
    utterance(200, 450, ended_ms=500, began_ms=300),
    utterance(300, ended_ms=500, began_ms=500, cut=True),
    utterance(ended_ms=10, began_ms=20, error="streams: all 2 are in use; try again later"),
    utterance(ended_ms=100, began_ms=900, cut=True),
]


def test_figures_of_a_row() -> None:
    row = figures(2, ROW)
    assert (row["complete"], row["cut"], row["cut_without_audio"], row["failed"]) == (2, 2, 1, 1)
    assert row["errors"] == ["streams: all 2 are in use; try again later"]
    # Of every utterance with audio, also of the one that was cut.
    assert row["first_audio_ms"] == {
        "mean": 200.0,
        "p50": 200.0,
        "p90": 280.0,
        "p95": 290.0,
        "p99": 298.0,
        "max": 300.0,
    }
    assert row["between_chunks_ms"]["mean"] == pytest.approx(400 / 3, abs=0.1)
    assert row["rtfx"] == 0.6  # 0.6 s of audio arrived in 1 s
    assert row["rtfx_of_a_stream"] == 0.3
    # Only of complete utterances, and shares also of the one that failed, but not of those cut.
    assert row["underrun_utterances"] == 1
    assert [row[f"c{ms}"] for ms in (50, 100, 200)] == [0.5, 0.5, 1.0]
    assert [row[f"buffer_{ms}"] for ms in (50, 100, 200)] == [0.3333, 0.3333, 0.6667]
    assert row["real_time_factor"]["max"] == 2.5
    assert row["streaming_real_time_factor"]["max"] == 1.5
    assert row["gap_free_start_ms"]["max"] == 350.0
    assert row["first_audible_ms"] is None


def test_a_row_in_which_nothing_arrived() -> None:
    row = figures(1, [utterance(ended_ms=100, cut=True)])
    assert (row["rtfx"], row["first_audio_ms"], row["c50"], row["buffer_50"]) == (None,) * 4
    assert as_tables([row]).count("-") >= 20


def test_tables_have_a_line_for_each_row() -> None:
    lines = as_tables([figures(2, ROW), figures(16, ROW)]).splitlines()
    assert [line.split()[:4] for line in lines[2:4]] == [
        ["2", "2", "2", "1"],
        ["16", "2", "2", "1"],
    ]
    assert lines[2].split()[4:9] == ["200.0", "200.0", "280.0", "290.0", "298.0"]
    assert lines[2].split()[-2:] == ["0.60", "0.30"]
    assert lines[7].split() == [
        *("2", "-", "-", "1", "50.0", "50.0", "100.0", "1.683", "1.017", "225.0", "337.5"),
        *("33.3", "33.3", "66.7"),
    ]
    assert max(map(len, lines)) <= 120
    assert lines[-1] == (
        "16 streams: 1 utterances had no audio yet at the time limit, and are not in the latencies"
    )


def test_random_tokens_lie_within_the_vocabulary_of_each_codebook() -> None:
    random = np.random.default_rng(0)
    tokens = Tokens(None, (3,), (2, 5, 1000)).take(500, random)
    assert (tokens.shape, tokens.dtype.name) == ((500, 3), "int32")
    assert tokens.min(axis=0).tolist() == [0, 0, tokens[:, 2].min()]
    assert tokens.max(axis=0)[:2].tolist() == [1, 4]
    assert 900 < tokens.max(axis=0)[2] < 1000
    assert Tokens(None, (), (7,)).take(100, random).max() == 6
    latents = Tokens(None, (4,)).take(10, random)
    assert (latents.shape, latents.dtype.name) == ((10, 4), "float32")


def test_tokens_of_a_file_are_cut_or_repeated() -> None:
    given = np.array([[1, 2], [3, 4], [5, 6]], np.int32)
    random = np.random.default_rng(0)
    assert Tokens(given).take(2, random).tolist() == [[1, 2], [3, 4]]
    assert Tokens(given).take(4, random).tolist() == [[1, 2], [3, 4], [5, 6], [1, 2]]


@pytest.fixture
def earlier(tmp_path: Path) -> str:
    """File of an earlier run."""
    path = tmp_path / "earlier.json"
    recordings = {"2": [heard.as_json() for heard in ROW]}
    path.write_text(json.dumps({"url": "host:8001", "rows": [], "recordings": recordings}))
    return str(path)


def test_a_recording_is_the_same_after_a_round_trip() -> None:
    sound = np.random.default_rng(0).uniform(-0.5, 0.5, 2400).astype(np.float32)
    heard = record([(0.1234567, sound), (0.30000004, sound[:7])], RATE, 0.35, began_s=1.23456789)
    assert heard.onset is not None
    for ours in (heard, *ROW):
        theirs = Recording.of_json(json.loads(json.dumps(ours.as_json())))
        assert theirs.as_json() == ours.as_json()
        assert figures(2, [theirs]) == figures(2, [ours])


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"recordings": 1}', '{"recordings": {"1": 1}}'),
        *('{"recordings": {"two": []}}', '{"recordings": {"1": [{}]}}'),
        *('{"recordings": {"1": ["no"]}}', '{"recordings": {"0": []}}'),
        *(
            json.dumps({"recordings": {"1": [ROW[0].as_json() | {name: value}]}})
            for name, value in [
                *(("samples", [1]), ("samples", [1, 1, 2**63]), ("samples", [0, 0, 0])),
                *(("sample_rate", "x"), ("sample_rate", 0), ("sample_rate", math.inf)),
                *(("ended_s", None), ("ended_s", 0), ("began_s", 10**400)),
                *(("onset", "x"), ("onset", 2400), ("other", 1)),
            ]
        ),
    ],
)
def test_a_file_that_holds_no_recordings(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "r.json").write_text(content)
    assert main(["bench", "--recordings", str(path)]) == 2
    assert f"{path}: cannot read recordings (" in capsys.readouterr().err


def test_tables_of_an_earlier_run(
    earlier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--recordings", earlier]) == 0
    assert capsys.readouterr().out == as_tables([figures(2, ROW)]) + "\n"
    assert [path.name for path in tmp_path.iterdir()] == ["earlier.json"]
    out = tmp_path / "again.json"
    assert main(["bench", "--recordings", earlier, "--out", str(out)]) == 0
    again = json.loads(out.read_text())
    assert again == json.loads(Path(earlier).read_text()) | {"rows": [figures(2, ROW)]}
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "--recordings", earlier, "--out", earlier]) == 0
    assert json.loads(Path(earlier).read_text()) == again
    (picture := tmp_path / "other.png").write_bytes(b"theirs")
    assert main(["bench", "--recordings", earlier, "--out", str(picture)]) == 2
    assert picture.read_bytes() == b"theirs"


def test_without_matplotlib_there_is_no_picture(
    earlier: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "out.json"
    assert main(["bench", "--recordings", earlier, "--out", str(out)]) == 0
    assert capsys.readouterr().err == (
        "token2wav bench: no picture, because the module matplotlib is missing; run: pip install "
        "'token2wav[bench]'\n"
    )
    assert out.is_file()
    assert not out.with_suffix(".png").exists()
