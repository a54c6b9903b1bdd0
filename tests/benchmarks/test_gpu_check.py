"""Rehearsal of the GPU report on a machine that has only torch, and its handling of errors and
time limits.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import venv
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import distribution
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu import engines, flows, server
from benchmarks.gpu.settings import RESULTS, LeftOut, Row, Rows, Settings
from benchmarks.gpu.worker import Results, _measured, run_section
from benchmarks.load.clients import Load
from testkit.models.golden import ROOT, TINY
from testkit.patience import PATIENCE_SECONDS, until

SOURCES = [
    *("benchmarks", "client", "exporters", "lab", "server", "testkit", "tests", "token2wav"),
    "pyproject.toml",
]
PACKAGES = ["torch", "triton", "numpy", "PyYAML", "safetensors", "pytest"]
# The least of all, on one core, without haste.
PATIENT = ["--set", "stream_s=1", "drift_chunks=3", "histories=[1]"]


def with_dependencies(names: list[str]) -> Iterator[str]:
    """Yields names of distributions and of all their dependencies that are needed here."""
    todo, known = list(names), set[str]()
    while todo:
        if (name := re.sub(r"[-_.]+", "-", todo.pop()).lower()) not in known:
            known.add(name)
            yield name
            needed = [Requirement(text) for text in distribution(name).requires or []]
            todo += [
                requirement.name
                for requirement in needed
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            ]


def machine(folder: Path, packages: list[str]) -> tuple[Path, Path]:
    """Makes a source tree, and an interpreter with some packages and without the project."""
    tree, environment = folder / "tree", folder / "bare"
    tree.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    venv.create(environment, symlinks=True)
    [site_packages] = environment.glob("lib/python*/site-packages")
    for name in with_dependencies(packages):
        package = distribution(name)
        for entry in {
            path.parts[0]
            for path in package.files or []
            if path.parts[0] not in ("..", "__pycache__")
        }:
            if not (site_packages / entry).exists():
                (site_packages / entry).symlink_to(str(package.locate_file(entry)))
    return tree, environment / "bin" / "python"


def run_on(tree: Path, python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python program in a source tree, in an environment without other variables."""
    outside = ("PATH", "HOME", "LANG", "TMPDIR")
    environment = {name: os.environ[name] for name in outside if name in os.environ}
    return subprocess.run(
        [str(python), *arguments],
        cwd=tree,
        # Compiled code of earlier versions, which torch keeps for all trees, would be found again.
        env=environment
        | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tree / "inductor")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_all_slices_on_a_bare_machine(tmp_path: Path) -> None:
    run = partial(run_on, *machine(tmp_path, PACKAGES))
    out = tmp_path / "out"
    for missing in ("token2wav", "tritonclient", "tqdm", "matplotlib", "onnx"):
        assert (
            run("-c", f"from importlib.metadata import version; version({missing!r})").returncode
            == 1
        )
    done = run("-m", "benchmarks.gpu_check", "--rehearse", "--out", str(out), *PATIENT)
    assert done.returncode == 0, done.stdout + done.stderr

    content = json.loads((out / "report.json").read_text())
    assert (content["gpu"], content["size"], content["commit"], len(content["runs"])) == (
        None,
        "tiny",
        None,
        3,
    )
    assert all(section["problem"] is None for section in content["sections"])
    rows = {(row["section"], row["key"]): row for row in content["rows"]}
    left_out = {section: row["left_out"] for (section, _), row in rows.items() if row["left_out"]}
    assert left_out == {
        "first_audio": "dependent launches need a GPU of compute capability 9.0",
        "server": "not installed: httpx",
        "qwen3_tts": "not installed: transformers",
    }
    measured = {section for (section, _), row in rows.items() if not row["left_out"]}
    assert measured == {
        "first_audio", "tests", "chunks", "parity", "drift", "streams", "products", "baselines",
        "codecs", "flows", "late_first",
    }  # fmt: skip
    assert any(row.get("skipped") for (section, _), row in rows.items() if section == "tests")
    assert (
        rows["parity", "lean, float32, 2 streams"]["mel"]
        > rows["parity", "exact, float32, 2 streams"]["mel"]
    )
    heard = rows["streams", "lean: 2 streams"]
    assert (heard["errors"], heard["first_audio_ms"]["p50"] > 0) == ([], True)
    for number in range(1, 4):
        files = list((out / f"slice-{number}").iterdir())
        assert len(files) <= 6
        assert max(path.stat().st_size for path in files) <= 4_000_000
    assert (out / "report.md").read_text().startswith("# Rehearsal: no GPU")
    assert done.stdout.count("not shown  ") == 8
    assert str(tmp_path) not in "".join(path.read_text() for path in out.glob("report.*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--set", "device=cuda:7"],
            "torch finds no CUDA device; --rehearse runs a small version of the report on a CPU",
        ),
        (["--rehearse", "--set", "batches=many"], "--set.batches: expected a list, got str"),
        (["--merge", "nowhere"], "nowhere has no results.json"),
    ],
)
def test_errors_are_one_sentence(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check", *arguments])
    from benchmarks.gpu_check import main  # changes sys.path

    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.endswith(f"error: {message}\n")


def small(tmp_path: Path) -> tuple[Settings, Results]:
    settings = Settings(tmp_path, "cpu").rehearsal()
    return settings, Results(tmp_path / RESULTS, {})


def section(tmp_path: Path) -> dict[str, Any]:
    [row] = json.loads((tmp_path / RESULTS).read_text())["sections"]
    return dict(row)


def test_a_section_has_a_time_limit_and_leaves_no_process(tmp_path: Path) -> None:
    settings, results = small(tmp_path)
    began = time.monotonic()
    run_section("streams", TINY, settings, results, 0.0)
    assert section(tmp_path)["problem"].startswith("the section exceeded its time")
    assert time.monotonic() - began < PATIENCE_SECONDS
    assert not holders(tmp_path / "log.txt")


def test_a_process_that_is_killed_before_its_first_row_ends_its_section(tmp_path: Path) -> None:
    settings, results = small(tmp_path)

    def kill() -> None:
        until(multiprocessing.active_children)
        [process] = multiprocessing.active_children()
        process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    run_section("streams", TINY, settings, results, PATIENCE_SECONDS)
    killer.join()
    assert section(tmp_path)["problem"] == "the process ended with SIGKILL"


class KillingResults(Results):
    """Results that kill the process of a section after its first row."""

    def add(self, section: str, key: str, row: Row) -> None:
        if not self.content["rows"]:
            [process] = multiprocessing.active_children()
            process.kill()
        super().add(section, key, row)


def test_a_section_goes_on_after_the_row_in_which_its_process_was_killed(tmp_path: Path) -> None:
    settings, _ = small(tmp_path)
    settings = replace(settings, batches=(1, 2))
    results = KillingResults(tmp_path / RESULTS, {})
    run_section("chunks", TINY, settings, results, PATIENCE_SECONDS)
    keys = [row["key"] for row in results.content["rows"]]
    assert len(keys) == len(set(keys)) == 7
    assert keys[0] == "the model"
    failed = [row["key"] for row in results.content["rows"] if row["problem"]]
    assert failed in ([], keys[1:2])
    # The process may have been killed before it began its next row.
    assert section(tmp_path)["problem"] == (None if failed else "the process ended with SIGKILL")
    assert "total_ms" in results.content["rows"][-1]


def ends_between_rows(
    name: str, folder: Path, settings: Settings, done: dict[str, Row], messages: Connection
) -> None:
    """Process of a section: the first two fail when their row has been sent."""
    if len(done) < 2:
        messages.send(("row", str(len(done)), {}))
    if len(done) == 1:
        os._exit(3)
    messages.send(("end", "", None if done else "RuntimeError: no device"))


def test_a_section_reports_errors_between_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, results = small(tmp_path)
    monkeypatch.setattr("benchmarks.gpu.worker._work", ends_between_rows)
    run_section("streams", TINY, settings, results, PATIENCE_SECONDS)
    assert len(results.content["rows"]) == 2
    assert section(tmp_path)["problem"] == "RuntimeError: no device; the process ended with 3"


def gone_on(rows: Rows, done: Callable[[str], Row | None]) -> dict[str, Row]:
    """Measures the rows that are not done, as a process does that follows another one."""
    measured = dict[str, Row]()
    with contextlib.suppress(StopIteration):
        key, measure = next(rows)
        while True:
            if (row := done(key)) is None:
                row = measured[key] = measure()
            key, measure = rows.send(row)
    return measured


def test_section_engines_goes_on_with_the_model_of_the_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, chunk = Mock(return_value=("model", {})), Mock(return_value={})
    monkeypatch.setattr(engines, "load", load)
    monkeypatch.setattr(engines, "chunk", chunk)
    case = re.compile(r"torch float32: (?!verified|the model|1 stream)")
    row = {"load_s": 1.0}
    settings = replace(small(tmp_path)[0], histories=(2.0, 10.0))
    rows = engines.engines(TINY, settings)
    assert len(gone_on(rows, lambda key: None if case.match(key) else row)) == 2
    assert load.call_count == 1
    assert [call.args[0] for call in chunk.call_args_list] == ["model", "model"]
    with pytest.raises(LeftOut, match="the model was not loaded"):
        gone_on(engines.engines(TINY, settings), lambda key: None if case.match(key) else {})
    assert load.call_count == 1


def test_section_server_goes_on_with_the_next_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(folder: Path, mode: str, loads: Iterable[Load], *_: object) -> Iterator[Row]:
        return ({"clients": load.clients} for load in loads)

    monkeypatch.setattr(server, "measure", measure)
    monkeypatch.setattr(server, "find_tritonserver", lambda folder: None)
    settings = replace(small(tmp_path)[0], clients=(1, 2, 3, 4))
    rows = server.server(TINY, settings)
    before = iter([{}, {"problem": "the process ended with SIGKILL"}])
    measured = gone_on(rows, lambda key: next(before, None))
    assert [row["clients"] for row in measured.values()] == [3, 4]


def test_section_flows_has_one_model_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that cannot be made, or whose rows another process measured, costs no other model."""
    made: list[weakref.ref[Mock]] = []

    def make(*_: object) -> Mock:
        assert all(model() is None for model in made), "a model before is still in memory"
        model = Mock()
        model.summary.graphs = SimpleNamespace(graphs=3)
        made.append(weakref.ref(model))
        if len(made) == 1:
            raise RuntimeError("no memory")
        return model

    monkeypatch.setattr(flows, "_with_random_weights", make)
    monkeypatch.setattr(flows, "first_packet", lambda model, settings, streams: {"ms": streams})
    settings = replace(small(tmp_path)[0], flows=("A", "B", "C", "D"), flow_streams=(1, 2))
    rows, measured = flows.flows(TINY, settings), dict[str, Row]()
    with contextlib.suppress(StopIteration):
        key, measure = next(rows)
        while True:
            # another process measured A, and ended before the last row of C
            done = key.startswith("A") or key in ("C: the model", "C: 1 streams, first audio")
            measured[key] = {} if done else _measured(measure)
            key, measure = rows.send(measured[key])
    assert len(made) == 3
    assert measured["B: the model"] == {"problem": "RuntimeError: no memory"}
    assert measured["B: 2 streams, first audio"] == {"left_out": "the model was not made"}
    assert [measured[f"{name}: 2 streams, first audio"] for name in "CD"] == [{"ms": 2}] * 2


def holders(path: Path) -> list[Path]:
    """Returns the `/proc` folders of processes that write their output to a file."""
    descriptors = []
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            descriptors += [output] if output.readlink() == path else []
        except (FileNotFoundError, PermissionError):
            continue
    return descriptors
