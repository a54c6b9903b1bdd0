"""`token2wav bench` with a server. `tests/served/test_codecs.py` runs it on real servers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from testkit.models.golden import DATA
from testkit.rigs.door_server import DoorServer
from token2wav.commands import main
from token2wav_client.bench import figures
from token2wav_client.listening import Recording

VOICE = str(DATA / "demo" / "voice.safetensors")


def test_rows_of_streams(
    rig: DoorServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, before = tmp_path / "bench.json", rig.ended()["finished"]
    load = ["--streams", "1", "3", "--rounds", "2", "--utterance-seconds", "1"]
    url = ["--url", rig.server.grpc_url, "--row-seconds", "120", "--out", str(out)]
    assert main(["bench", *url, *load, "--voice", VOICE]) == 0
    report = json.loads(out.read_text())
    assert [row["streams"] for row in report["rows"]] == [1, 3]
    assert [row["complete"] for row in report["rows"]] == [2, 6]
    rig.wait_until_empty()
    assert rig.ended()["finished"] - before >= 2 + 6 + 2  # the first two are not counted
    for row in report["rows"]:
        assert (row["cut"], row["failed"], row["errors"]) == (0, 0, [])
        assert row["rtfx"] > 0
        assert 0 < row["first_audio_ms"]["p50"] <= row["gap_free_start_ms"]["max"]
    rows = {name: list(map(Recording.of_json, row)) for name, row in report["recordings"].items()}
    assert [figures(int(name), heard) for name, heard in rows.items()] == report["rows"]
    # Stream 0 sends lengths 0 and 1 of ten from 0.5 to 1.5 s, in tokens of 40 ms.
    assert [int(heard.samples.sum()) for heard in rows["1"]] == [12 * 960, 15 * 960]
    assert out.with_suffix(".png").is_file()
    assert capsys.readouterr().out.splitlines()[2].split()[:4] == ["1", "2", "0", "0"]


def test_utterances_that_are_open_at_the_time_limit_are_cut(
    rig: DoorServer, tmp_path: Path
) -> None:
    """The tokens of the utterances are those of a file."""
    out, began = tmp_path / "bench.json", time.monotonic()
    tokens = tmp_path / "tokens.txt"
    tokens.write_text("<|s_17|><|s_4711|><|s_42|>")
    arguments = ["--streams", "2", "--utterance-seconds", "20", "--rate", "25", "--quiet"]
    arguments += ["--tokens", str(tokens)]
    url = ["--url", rig.server.grpc_url, "--row-seconds", "2", "--out", str(out)]
    assert main(["bench", *url, *arguments, "--voice", VOICE]) == 0
    [row] = json.loads(out.read_text())["rows"]
    assert (row["complete"], row["cut"], row["failed"]) == (0, 2, 0)
    assert (row["c50"], row["real_time_factor"]) == (None, None)
    assert time.monotonic() - began < 60  # the utterances would take at least 20 s each
    rig.wait_until_empty()


def test_a_server_that_is_full_is_a_figure(limited: DoorServer, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    load = ["--streams", "4", "--rounds", "1", "--utterance-seconds", "1", "--quiet"]
    url = ["--url", limited.server.grpc_url, "--row-seconds", "120", "--out", str(out)]
    assert main(["bench", *url, *load, "--voice", VOICE]) == 0
    [row] = json.loads(out.read_text())["rows"]
    assert row["complete"] + row["failed"] == 4
    assert row["failed"] >= 1
    assert row["errors"] == ["streams: all 2 are in use; try again later"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "voice: missing, but this model needs one; add --voice FILE, --voice-name NAME or"),
        ("--voice-name nobody", "voice: "),
        ("--voice {} --codebooks 2", "codebooks: 2, but a token of this model has 1"),
        ("--voice {} --model none", "model 'none' at"),
    ],
)
def test_a_server_that_cannot_be_measured_gives_one_sentence(
    arguments: str,
    message: str,
    rig: DoorServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "bench.json"
    options = arguments.format(VOICE).split()
    assert main(["bench", "--url", rig.server.grpc_url, "--out", str(out), *options]) in (2, 4, 6)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"token2wav bench: error: {message}")
    assert not out.exists()
