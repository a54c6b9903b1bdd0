"""Conclusions of the GPU report and their sources: comparison of batches, stream search."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.chunk_batch import chunk_key, shortage, spoken
from benchmarks.gpu.chunks import summary
from benchmarks.gpu.first_audio import first_audio_key
from benchmarks.gpu.parity import Utterance, check, speak, utterance
from benchmarks.gpu.report import (
    LOOP_HISTORIES,
    WORDS,
    Content,
    faults,
    markdown,
    merge,
    planned_parity,
    systems,
    verdicts,
    write_report,
)
from benchmarks.gpu.sections import ON_PURPOSE
from benchmarks.gpu.settings import LAST_S, LOOP, MINUTES, OURS, PLANNED, RESULTS, SLICES
from benchmarks.gpu.streams import next_number
from benchmarks.gpu.worker import without_folders
from testkit.models.golden import TINY
from token2wav import BackendError, Token2Wav
from token2wav.families.cosyvoice3.config import CosyVoice3Config
from token2wav.stages.stage import CacheUsage


def row(section: str, key: str, **values: Any) -> dict[str, Any]:
    return {"section": section, "key": key, "problem": None, "left_out": None, **values}


def chunk(streams: int, hop: int, spoken_s: float, ms: float) -> dict[str, Any]:
    times = {name: [ms, 0.9 * ms, 1.1 * ms] for name in ("flow_ms", "vocoder_ms", "total_ms")}
    size = {"streams": streams, "hop_tokens": hop, "spoken_s": spoken_s, "computed_tokens": hop}
    return row("chunks", chunk_key(streams, hop, spoken_s), **size, **times)


def system(name: str, streams: int, spoken_s: float, ms: float) -> dict[str, Any]:
    timed = chunk(streams, 25, spoken_s, ms)
    facts = {"system": name, "one at a time": name == LOOP, "key": f"{name}: {timed['key']}"}
    return timed | facts | {"section": "baselines"}


def good() -> dict[str, Any]:
    """Returns the results of a GPU that meets every aim."""
    heard = {"clients": 320, "rate": 25.0, "failed": [], "share_without_gaps": {"0.05 s": 0.995}}
    drift = {"drift": -0.05, "third_ms": 9.0, "last_ms": 8.5, "chunks": 60}
    rows = [
        row("tests", "tests/kernels", passed=9, skipped=0),
        *(row("parity", key, mel=1e-4) for key in planned_parity()),
        row("first_audio", first_audio_key(1), ms=[4.0, 3.9, 4.5], audio_ms=160.0),
        chunk(1, 25, 0.0, 9.0),
        *(chunk(16, 100, spoken_s, 80.0) for spoken_s in PLANNED.histories),
        *(system(LOOP, 1, spoken_s, 50.0) for spoken_s in LOOP_HISTORIES),
        *(system(OURS, 64, spoken_s, 256.0) for spoken_s in LOOP_HISTORIES),
        row("baselines", f"{OURS}: one stream", system=OURS, mel_error=1e-4),
        row("drift", "chunks of 25 tokens", **drift),
        row("streams", "lean: 320 streams", setting="lean", streams=320, unbroken=1.0),
        row("server", "lean, 320 clients", **heard),
    ]
    facts = {
        "gpu": "NVIDIA H200",
        "size": "full",
        "precision": "float16",
        "graphs": True,
        "commit": "abc",
    }
    return {
        "facts": facts,
        "sections": [{"section": "chunks", "problem": None, "took_s": 1.0}],
        "rows": rows,
    }


def words(content: Content) -> list[str]:
    return [WORDS[verdict.met] for verdict in verdicts(content)]


def changed(section: str, key: str = "", **values: Any) -> dict[str, Any]:
    """Returns results that meet every aim, with changed values in some rows of a section.

    Only rows with `key` in their key are changed.
    """
    content = good()
    for entry in content["rows"]:
        if entry["section"] == section and key in entry["key"]:
            entry.update(values)
    return content


def test_everything_met() -> None:
    assert words(good()) == ["met"] * 7
    assert faults(good()) == []
    assert markdown(good()).startswith("# NVIDIA H200\n")


def test_a_slice_fits_a_call_of_10_minutes() -> None:
    """The rest is for imports, and for the model of the public size."""
    for sections in SLICES.values():
        assert sum(seconds for _, seconds, _ in sections) <= 60 * MINUTES - LAST_S


def test_systems_stand_side_by_side() -> None:
    """The public loop takes the time of one stream for each stream."""
    rows = {(entry["system"], entry["streams"]): entry for entry in systems(good())}
    assert rows.keys() == {(LOOP, 1), (LOOP, 64), (OURS, 64)}
    assert (rows[LOOP, 64]["ms"], rows[LOOP, 1]["times real time"]) == (64 * 50.0, 20.0)
    assert rows[OURS, 64]["times real time"] == 250.0
    assert (rows[OURS, 64]["error of the mel"], rows[LOOP, 1]["error of the mel"]) == (1e-4, None)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("python -m benchmarks.gpu_check --out /tmp/a/b --slice 1", "--out b --slice 1"),
        ("[Errno 2] no file: '/home/me/full/flow.pt'", "[Errno 2] no file: 'flow.pt'"),
        ("https://github.com/a/b and tests/a/b.py", "https://github.com/a/b and tests/a/b.py"),
    ],
)
def test_results_name_no_folder_of_the_machine(text: str, shown: str) -> None:
    assert without_folders(text).endswith(shown)


LATE, SHORT = [10.1, 9.0, 11.0], [330.0, 1.0, 1.0]
GAPS = {"0.05 s": 0.9}
NOT_MET = [
    (changed("parity", "exact, float16, 33 streams", problem="mel 1"), 0),
    (changed("first_audio", ms=[5.1, 5.0, 6.0]), 1),
    (changed("chunks", "1 streams", total_ms=LATE), 2),
    (changed("drift", drift=0.1), 3),
    (changed("baselines", "64 streams, 25 tokens after 10 s", total_ms=SHORT), 4),
    (changed("streams", streams=299, unbroken=0.98), 5),
    (changed("server", clients=200, share_without_gaps=GAPS), 6),
]


@pytest.mark.parametrize(("content", "aim"), NOT_MET)
def test_each_aim_has_its_bound(content: Content, aim: int) -> None:
    assert words(content) == ["not met" if index == aim else "met" for index in range(7)]
    assert len(faults(content)) == (1 if aim == 0 else 0)  # slow results are no faults


LEFT_OUT = [
    ("parity", "lean, float16, 64 streams", 0),
    ("first_audio", "", 1),
    ("chunks", "1 streams, 25", 2),
    ("drift", "", 3),
    ("baselines", "after 10 s", 4),
    ("streams", "", 5),
    ("server", "", 6),
]


@pytest.mark.parametrize(("section", "key", "aim"), LEFT_OUT)
def test_an_aim_of_which_a_part_did_not_run_is_not_shown(section: str, key: str, aim: int) -> None:
    content = good()
    for index, entry in enumerate(content["rows"]):
        if entry["section"] == section and key in entry["key"]:
            content["rows"][index] = row(section, entry["key"], left_out="memory", took_s=0.0)
    assert words(content) == ["not shown" if index == aim else "met" for index in range(7)]
    assert faults(content) == []


def test_numbers_below_the_aim_are_not_shown_until_one_is_too_many() -> None:
    assert words(changed("streams", streams=200))[5] == "not shown"
    assert words(changed("streams", setting="exact", streams=200, unbroken=0.5))[5] == "not shown"


@pytest.mark.parametrize("facts", [{"gpu": None}, {"size": "tiny"}])
def test_a_rehearsal_shows_nothing(facts: dict[str, Any]) -> None:
    content = good()
    content["facts"] |= facts
    assert words(content) == ["not shown"] * 7
    assert markdown(content).startswith("# Rehearsal: ")


def test_faults_are_named() -> None:
    content = changed("tests", problem="1 failed, tests/a.py::test_b")
    content["rows"].append(row("recovery", ON_PURPOSE, problem="device-side assert"))
    content["sections"].append(
        {"section": "streams", "problem": "the process ended with SIGKILL", "took_s": 1.0}
    )
    assert faults(content) == [
        "tests: tests/kernels: 1 failed, tests/a.py::test_b",
        "streams: the process ended with SIGKILL",
    ]


def test_slices_become_one_report(tmp_path: Path) -> None:
    def write(name: str, content: Content) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / RESULTS).write_text(json.dumps(content))
        return tmp_path / name

    first = write("first", good())
    again = good()
    again["rows"] = [chunk(1, 25, 0.0, 8.0), row("drift", "chunks of 25 tokens", left_out="memory")]
    content = merge([first, write("again", again)])
    rows = {(entry["section"], entry["key"]): entry for entry in content["rows"]}
    assert len(rows) == len(good()["rows"])
    assert rows["chunks", chunk_key(1, 25, 0.0)]["total_ms"][0] == 8.0
    # a row that was left out replaces no measured row
    assert rows["drift", "chunks of 25 tokens"]["drift"] == -0.05
    write_report(content, tmp_path / "report")
    assert {path.suffix for path in (tmp_path / "report").iterdir()} == {".md", ".json"}
    with pytest.raises(ValueError, match="gpu is NVIDIA L4, and in the folders before NVIDIA H200"):
        merge([first, write("other", good() | {"facts": good()["facts"] | {"gpu": "NVIDIA L4"}})])


@pytest.mark.parametrize("limit", [0, 1, 7, 8, 9, 100, 321, 1023, 1024, 5000])
def test_the_search_ends_close_to_the_largest(limit: int) -> None:
    held: dict[int, bool] = {}
    while (number := next_number(held, 8, 1024)) is not None:
        assert number not in held
        held[number] = number <= limit
    largest = max((number for number, well in held.items() if well), default=0)
    assert largest <= min(limit, 1024) <= largest + max(1, 0.06 * largest)
    assert len(held) <= 20


def test_time_between_kernels() -> None:
    spans = [("a", 0.0, 2.0), ("b", 1.0, 1.5), ("a", 3.0, 4.0), ("c", 4.0, 5.0), ("c", 5.5, 6.0)]
    random.Random(0).shuffle(spans)
    figures = summary(spans)
    assert (figures["kernels_ms"], figures["idle_ms"], figures["calls"]) == (5.0, 1.5, 5)
    assert figures["kernels"][0] == {"name": "a", "ms": 3.0, "calls": 2}
    assert summary([])["kernels"] == []


def test_a_stream_takes_a_page_for_a_second_and_shares_its_prompt(
    model: Token2Wav, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_pages(pages: int) -> Token2Wav:
        monkeypatch.setattr(
            model.pipeline.flow, "usage", lambda: CacheUsage(capacity=pages, page_bytes=90_112_000)
        )
        return model

    # 50 of the prompt's 75 tokens are in 2 shared pages. The other 25 and the tokens of the
    # utterance are in pages of the stream.
    assert shortage(with_pages(2 + 4 * 4), 4, 50 + 25) is None
    assert (
        shortage(with_pages(2 + 4 * 4 - 1), 4, 50 + 25)
        == "the batch needs 18 pages of 90.1 MB, but the cache has 17"
    )
    assert shortage(with_pages(2 + 128 * 3), 128, 25) is None  # a stream reserves 3 pages
    assert shortage(with_pages(2 + 128 * 3 - 1), 128, 25) is not None
    assert shortage(with_pages(0), 128, 25) is None  # an engine without a cache


@pytest.fixture(scope="module")
def model() -> Token2Wav:
    return Token2Wav.load(TINY)


@pytest.fixture(scope="module")
def expected(model: Token2Wav) -> list[Utterance]:
    return [speak(model, [utterance(model.config, index)])[0] for index in (1, 2)]


def test_the_time_of_audio_that_is_nan_is_no_result(
    model: Token2Wav, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        model.pipeline.vocoder, "advance", lambda batch: [torch.tensor([torch.nan])]
    )
    with (
        pytest.raises(BackendError, match="NaN or infinite audio"),
        spoken(model, 1, 0, 25) as batch,
    ):
        batch.advance(25)


@pytest.mark.parametrize("spoil", ["", "mixed up", "nan", "audio"])
def test_a_planted_error_is_beyond_the_bound(
    spoil: str, model: Token2Wav, expected: list[Utterance], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expected[0].mel.shape[1] == 2 * len(expected[0].tokens)
    assert len(expected[1].audio) == 960 * len(expected[1].tokens)

    def wrong(model: Token2Wav, utterances: list[Utterance]) -> list[Utterance]:
        first, second = speak(model, utterances)
        if spoil == "mixed up":
            first = first._replace(mel=torch.roll(first.mel, 1, dims=1))
        if spoil == "audio":
            second = second._replace(audio=-second.audio)
        return [first._replace(mel=first.mel * torch.nan) if spoil == "nan" else first, second]

    monkeypatch.setattr("benchmarks.gpu.parity.speak", wrong)
    comparison = check(model, 2, expected, 1e-5)
    assert (comparison["problem"] or "").partition(" ")[0] == {"": "", "audio": "audio"}.get(
        spoil, "mel"
    )


def test_prompts_and_lengths_of_a_batch_are_all_different() -> None:
    config = CosyVoice3Config.read(TINY)
    utterances = [utterance(config, index) for index in range(12)]
    lengths = {(len(stream.voice.prompt_tokens), len(stream.tokens)) for stream in utterances}
    assert len(lengths) == 12
