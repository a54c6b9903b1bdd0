from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from token2wav_server import TritonNotFoundError, binaries
from token2wav_server.binaries import find_tritonserver


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hides a tritonserver that this machine may have, so that only the wheel is found."""
    monkeypatch.delenv("TRITONSERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(binaries, "_INSTALLED", tmp_path / "nowhere")


def installation(root: Path) -> Path:
    """Makes what the NGC image has."""
    executable = root / "bin" / "tritonserver"
    stub = root / "backends" / "python" / "triton_python_backend_stub"
    for file in (executable, stub):
        file.parent.mkdir(parents=True)
        file.touch(mode=0o755)
    return executable


def test_wheel(tmp_path: Path) -> None:
    triton = find_tritonserver(tmp_path)
    assert os.access(triton.executable, os.X_OK)
    backend = triton.backends / "python"
    assert sorted(link.name for link in backend.iterdir() if link.is_file()) == [
        "libtriton_python.so",
        "triton_python_backend_stub",
        "triton_python_backend_utils.py",
    ]
    assert triton.environment["PATH"].startswith(str(Path(sys.executable).parent))
    assert "nvidia_pytriton.libs" in triton.environment["LD_LIBRARY_PATH"]


@pytest.mark.parametrize("way", ["TRITONSERVER", "PATH", "image"])
def test_installation_is_preferred_to_the_wheel(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable = installation(tmp_path / "triton")
    if way == "TRITONSERVER":
        monkeypatch.setenv("TRITONSERVER", str(executable))
    elif way == "PATH":
        monkeypatch.setenv("PATH", str(executable.parent))
    else:
        monkeypatch.setattr(binaries, "_INSTALLED", executable)
    folder = tmp_path / "empty"
    triton = find_tritonserver(folder)
    assert triton.executable == executable
    assert triton.backends == executable.parent.parent / "backends"
    assert triton.environment.get("LD_LIBRARY_PATH") == os.environ.get("LD_LIBRARY_PATH")
    assert not folder.exists()


def test_named_executable_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONSERVER", str(tmp_path / "none"))
    with pytest.raises(TritonNotFoundError, match=r"TRITONSERVER=.*none is not an executable file"):
        find_tritonserver(tmp_path)


def test_installation_without_python_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable = installation(tmp_path / "triton")
    (tmp_path / "triton" / "backends" / "python" / "triton_python_backend_stub").unlink()
    monkeypatch.setenv("TRITONSERVER", str(executable))
    with pytest.raises(TritonNotFoundError, match="has no Python backend"):
        find_tritonserver(tmp_path)


def test_no_tritonserver_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(TritonNotFoundError, match=r"pip install --no-deps nvidia-pytriton==0\.7\.0"):
        find_tritonserver(tmp_path)


def test_python_without_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "_PYTHON", "3.99")
    with pytest.raises(TritonNotFoundError, match=r"Python 3\.99: use Python 3\.10, 3\.11 or 3\.12"):
        find_tritonserver(tmp_path)


@pytest.mark.parametrize("version", ["glibc 2.31", "", "musl"])
def test_old_system(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "confstr", lambda name: version)
    with pytest.raises(TritonNotFoundError, match=r"glibc 2\.35 or newer"):
        find_tritonserver(tmp_path)


def test_missing_libpython(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "_libpython", lambda: "libpython3.99.so.1.0")
    with pytest.raises(TritonNotFoundError, match=r"libpython3\.99\.so\.1\.0.* cannot be loaded: install it"):
        find_tritonserver(tmp_path)
