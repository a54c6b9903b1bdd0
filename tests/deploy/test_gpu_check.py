"""`make gpu-check` rehearsed: the same command and the same sections, in small and on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.processes import run_section
from benchmarks.gpu.records import Record
from benchmarks.gpu.settings import rehearsal
from benchmarks.gpu_check import main, write_report
from tests.support.golden import ROOT, TINY
from token2wav_server.plan_compute import read_costs

# Not the tests, which this is one of, nor the server: tests/server has its load, and together they take minutes.
SECTIONS = ["floor", "parity", "chunks", "peer", "streams", "profile"]
FACTS = {"date": "2030-01-01", "commit": "abc", "command": "test", "size": "tiny"}


def test_a_rehearsal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--rehearse", "--out", str(tmp_path)]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--sections", *SECTIONS],
        cwd=ROOT,
        env=alone,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records: dict[str, dict[str, Any]] = {
        name: json.loads((tmp_path / f"{name}.json").read_text()) for name in SECTIONS
    }
    for record in records.values():
        assert record["problem"] is None
        assert (record["device"], record["gpu"], record["size"]) == ("cpu", None, "tiny")
        assert {"date", "commit", "command", "packages", "took_s"} <= record.keys()

    assert set(records["floor"]["operations_per_s"]) == {"float16", "tf32", "float32", "float64"}
    assert [row["case"]["engine"] for row in records["parity"]["engines"]] == ["torch"]
    [batch] = records["parity"]["batches"]
    assert (batch["streams"], batch["problem"]) == (3, None)
    buckets = records["parity"]["buckets"]
    assert {row["filling"] for row in buckets} == {"full", "part"}
    assert len(buckets) == 6

    rows = records["chunks"]["rows"]
    assert [(row["streams"], row["spoken_s"], row["hop_tokens"]) for row in rows] == [
        (streams, *place) for streams in (1, 2) for place in ((0.0, 25), (2.0, 25), (2.0, 50))
    ]
    # A first chunk has the last 25 tokens of the prompt in it, which look ahead into the utterance.
    assert [row["computed_tokens"] for row in rows[:3]] == [50, 25, 50]
    assert all(row["ratio"] == pytest.approx(row["total_ms"][0] / row["floor_ms"], rel=0.02) for row in rows)
    assert len(records["chunks"]["drift"]["chunk_ms"]) == 4
    costs = read_costs(tmp_path / "chunks.json", None, "tiny", 30.0, 25.0).costs
    assert [cost.batch for cost in costs] == [1, 2]

    [row] = records["peer"]["rows"]
    assert row["ratio"] > 0
    for capacity in records["streams"]["capacity"]:
        assert capacity["problem"] is None
    for trial in records["streams"]["trials"]:
        assert trial["errors"] == []
        assert trial["unheard"] == 0
        assert trial["pages_per_stream"] > 0
    assert {profile["streams"] for profile in records["profile"]["profiles"]} == {1, 2}

    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# Rehearsal: no GPU")
    assert report.count("| no verdict |") == 5
    assert all(f"\n## {name}\n" in report for name in SECTIONS)
    assert {path.name for path in tmp_path.glob("*.png")} == {"chunks.png", "capacity.png"}
    assert "no verdict" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rehearse", "--batches", "1", "0"], "argument --batches: 0 is not positive"),
        (["--device", "cuda:7"], "torch sees no CUDA device; --rehearse runs the report in small on a CPU"),
    ],
)
def test_what_cannot_run_says_so(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.endswith(f"error: {message}\n")


def test_what_was_interrupted_says_so(tmp_path: Path) -> None:
    record = Record(tmp_path / "chunks.json", FACTS)
    record.add("rows", {"streams": 1})
    assert json.loads((tmp_path / "chunks.json").read_text())["problem"].startswith("it was interrupted")
    record.finish()
    content = json.loads((tmp_path / "chunks.json").read_text())
    assert (content["problem"], content["rows"]) == (None, [{"streams": 1}])


def test_an_interrupt_that_was_lost_comes_again(tmp_path: Path) -> None:
    record = Record(tmp_path / "chunks.json", FACTS)
    with suppress(KeyboardInterrupt):
        record.interrupt(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        record.finish()
    assert json.loads((tmp_path / "chunks.json").read_text())["problem"].startswith("it was interrupted")


def test_a_section_that_fails_is_a_fault_and_the_next_one_runs(tmp_path: Path) -> None:
    settings = rehearsal(tmp_path / "results")
    problem = run_section("profile", tmp_path / "no model", settings, FACTS)
    assert problem is not None
    assert "no model" in problem
    record = json.loads((settings.out / "profile.json").read_text())
    assert record["problem"] == problem
    assert run_section("floor", TINY, settings, FACTS) is None
    assert write_report(settings.out) == [f"section profile: {problem}"]
    assert "**Ended early:**" in (settings.out / "report.md").read_text()


def test_a_section_has_a_time_limit(tmp_path: Path) -> None:
    settings = replace(rehearsal(tmp_path), minutes=0.0)
    assert (
        run_section("streams", TINY, settings, FACTS) == "ended after 0 minutes; what it had measured by then is here"
    )
    assert json.loads((tmp_path / "streams.json").read_text())["took_s"] >= 0
