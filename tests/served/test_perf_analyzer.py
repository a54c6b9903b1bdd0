"""A run of NVIDIA's perf_analyzer if it is installed, with the input of `token2wav perf-data`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from testkit.models.golden import DATA, ROOT
from testkit.rigs.processes import finished
from testkit.rigs.server_rig import Rig
from token2wav.commands import main

PERF_ANALYZER = ROOT / "scripts" / "perf_analyzer.sh"


def test_a_real_run_against_a_real_server(rig: Rig, tmp_path: Path) -> None:
    environment = {**os.environ, "PERF_ANALYZER_DOWNLOAD": "0"}
    if finished(PERF_ANALYZER, "--version", env=environment).returncode:
        pytest.skip(
            "perf_analyzer is not on this machine; scripts/perf_analyzer.sh --version downloads it"
        )
    data = tmp_path / "data.json"
    utterance = [f"--tokens={DATA}/demo/tokens.npy", f"--voice={DATA}/demo/voice.safetensors"]
    assert main(["perf-data", *utterance, "--length=50", f"--out={data}"]) == 0
    export = tmp_path / "export.json"
    options = f"-m token2wav -u {rig.server.grpc_url} -i grpc --async --streaming"
    load = f"--input-data {data} --concurrency-range 2 --request-count 4"
    arguments = [*options.split(), *load.split(), "--profile-export-file", export]
    done = finished(PERF_ANALYZER, *arguments)
    assert done.returncode == 0, done.stderr
    [experiment] = json.loads(export.read_text())["experiments"]
    assert len(experiment["requests"]) == 4
