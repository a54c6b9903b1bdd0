from __future__ import annotations

import argparse
import os
import pickle
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testkit.models.tiny_model import TINY, tiny_copy
from token2wav_server import cli
from token2wav_server.launcher.access import Access


def test_model_folder_that_cannot_be_served(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(str(tmp_path)) == 2
    assert_one_error(capfd, str(tmp_path))


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.mkdir", "!new:os.mkdir"])
def test_yaml_with_code_is_refused_and_not_executed(
    tag: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tiny_copy(tmp_path) / "cosyvoice3.yaml"
    before, _, _ = path.read_text().partition("flow: !new:")
    path.write_text(f"{before}flow: {tag} ['{tmp_path}/executed']\n")
    assert run(str(path.parent)) == 2
    assert_one_error(capfd, "cosyvoice3.yaml")
    assert not (tmp_path / "executed").exists()


class _MakesAFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_weights_with_code_are_refused_and_not_executed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bait = tmp_path / "executed"
    weights = {"input_embedding.weight": _MakesAFolder(bait)}
    folder = tiny_copy(tmp_path)
    (folder / "flow.safetensors").unlink()
    (folder / "flow.pt").write_bytes(pickle.dumps(weights))
    assert run(str(folder)) == 2
    assert_one_error(capfd, "refused, nothing was executed")
    assert not bait.exists()


def test_nothing_in_the_working_directory_is_executed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('executed')")
    monkeypatch.chdir(tmp_path)
    assert run(str(TINY), "--model-repository", "none", "--canary-seconds=0") == 3
    assert_one_error(capfd, "none is not a folder")


def test_unreadable_config(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(str(TINY), "--config", str(tmp_path / "none.yaml")) == 2
    assert_one_error(capfd, "none.yaml")


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        pytest.param(
            "runtime: {device: 'cuda:99'}",
            "runtime.device: 'cuda:99' is not available; torch finds",
            marks=pytest.mark.slow,
        ),
        ("runtime: {device: cpu, backend: onnx}", "run: token2wav export onnx --model"),
        pytest.param(
            "runtime: {device: cpu, backend: tensorrt}",
            "tensorrt needs an NVIDIA GPU, but the device is cpu",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "runtime: {device: cpu, cache_mib: 10000000}",
            "runtime.cache_mib: 10000000 MiB, but ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "stream: {max_hop_tokens: 30}",
            "stream.max_hop_tokens: 30 is not a multiple",
            marks=pytest.mark.slow,
        ),
        ("limits: {streams: 100000000}", "limits.streams: 100000000 is not between 1 and 10000"),
        ("limits: {streams: 2, streams: 3}", "key 'streams' appears more than once"),
    ],
)
def test_settings_that_this_machine_cannot_serve(
    settings: str, part: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "server.yaml").write_text(settings)
    assert run(str(TINY), "--config", str(tmp_path / "server.yaml")) == 2
    assert_one_error(capfd, part)


@pytest.mark.parametrize("host", ["203.0.113.5", "::1%none", "x" * 300, ""])
def test_a_host_that_is_not_of_this_machine(host: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(str(TINY), "--host", host) == 2
    assert_one_error(capfd, f"--host {host}: not an address" if host else "--host: empty")


def test_a_standard_output_that_was_closed_before_the_start(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", None)  # as Python does
    assert run(str(TINY), "--host", "") == 2
    assert "error: --host: empty" in capfd.readouterr().err


def test_half_a_certificate(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(str(TINY), "--tls-certificate=server.crt") == 2
    assert_one_error(capfd, "TLS needs both --tls-certificate and --tls-key")


@pytest.mark.parametrize(
    ("one", "other"),
    [("http", "grpc"), ("http", "metrics"), ("grpc", "metrics"), ("grpc", "status")],
)
def test_two_services_on_one_port(one: str, other: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(str(TINY), f"--{one}-port=9000", f"--{other}-port=9000") == 2
    assert_one_error(
        capfd, f"--{one}-port and --{other}-port are both 9000; give each its own port"
    )


def test_signals_and_triton_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first signal and a second Ctrl-C interrupt the server. All later ones are ignored."""

    def serve(options: argparse.Namespace, extra_args: list[str]) -> int:
        assert (options.model, options.verbose, extra_args) == ("m", True, ["--log-info=1", "--"])
        for number in (signal.SIGTERM, signal.SIGINT):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
        return 0

    monkeypatch.setattr(cli, "_serve", serve)
    assert run("m", "--verbose", "--", "--log-info=1", "--") == 0


def test_a_canary_without_a_model_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    server: Any = SimpleNamespace(access=Access(), canary_name="canary", models=("echo",))
    assert cli._canary(30.0, 60.0, server) is None
    assert capsys.readouterr().out == (
        "token2wav: the canary is off, so a hanging model process is not detected: "
        "no model token2wav or token2wav_ensemble is loaded\n"
    )


def run(*arguments: str) -> int:
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        return cli.main(arguments)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def without_memory(output: str) -> str:
    """Returns an output without the warning of a machine with little free memory."""
    return re.sub(r"(?m)^token2wav: warning: room for .*\n", "", output)


def assert_one_error(capfd: pytest.CaptureFixture[str], part: str) -> None:
    output = capfd.readouterr()
    started = without_memory(output.out)
    assert re.fullmatch(r"token2wav: starting a server for .*\n", started), output.out
    assert re.fullmatch(rf"token2wav serve: error: .*{re.escape(part)}.*\n", output.err), output.err
