from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.rigs.processes import finished
from token2wav_server import TritonNotFoundError
from token2wav_server.launcher import binaries
from token2wav_server.launcher.binaries import find_tritonserver

STUB = "backends/python/triton_python_backend_stub"


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hides a tritonserver that this machine may have, so that only the wheel is found."""
    monkeypatch.delenv("TOKEN2WAV_TRITONSERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(binaries, "_INSTALLED", tmp_path / "nowhere")


@pytest.fixture
def installation(tmp_path: Path) -> Path:
    """Makes the layout of /opt/tritonserver in the NGC image, with empty files."""
    root = tmp_path / "triton"
    for file in (root / "bin" / "tritonserver", root / STUB):
        file.parent.mkdir(parents=True)
        file.touch(mode=0o755)
    return root


@pytest.mark.python_models
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


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_a_stub_loads_the_libpython_of_the_system(version: str) -> None:
    stubs = binaries.WHEEL_FOLDER / "pytriton" / "tritonserver" / "python_backend_stubs"
    stub = stubs / version / "triton_python_backend_stub"
    libraries = subprocess.run(
        ["/usr/bin/ldd", stub], capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r"(libpython\S+) =>", libraries) == [f"libpython{version}.so.1.0"]
    assert os.access(stub, os.X_OK)


@pytest.mark.parametrize("way", ["variable", "PATH", "image"])
def test_installation_is_preferred_to_the_wheel(
    way: str, installation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "variable":
        monkeypatch.setenv("TOKEN2WAV_TRITONSERVER", str(installation))
    elif way == "PATH":
        monkeypatch.setenv("PATH", str(installation / "bin"))
    else:
        monkeypatch.setattr(binaries, "_INSTALLED", installation)
    folder = tmp_path / "empty"
    triton = find_tritonserver(folder)
    assert triton.executable == installation / "bin" / "tritonserver"
    assert triton.backends == installation / "backends"
    assert triton.environment.get("LD_LIBRARY_PATH") == os.environ.get("LD_LIBRARY_PATH")
    assert not folder.exists()


def test_the_named_installation_is_preferred_to_all_others(
    installation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path = shutil.copytree(installation, tmp_path / "other")
    monkeypatch.setenv("PATH", str(on_path / "bin"))
    monkeypatch.setenv("TOKEN2WAV_TRITONSERVER", str(installation))
    assert find_tritonserver(tmp_path).backends == installation / "backends"


def test_a_named_installation_that_cannot_be_used(
    installation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (installation / STUB).unlink()
    for path, message in (
        (tmp_path / "none", "TOKEN2WAV_TRITONSERVER=.*none is not an installation of Triton"),
        (installation, "has no Python backend"),
    ):
        monkeypatch.setenv("TOKEN2WAV_TRITONSERVER", str(path))
        with pytest.raises(TritonNotFoundError, match=message):
            find_tritonserver(tmp_path)
    assert find_tritonserver(tmp_path, python_models=False).backends == installation / "backends"


def test_installation_for_another_python(
    installation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For Python models, the launcher accepts only a stub that was made for this Python version."""
    monkeypatch.setenv("TOKEN2WAV_TRITONSERVER", str(installation))
    python_version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for version in ("3.10", "3.11", "3.12", "3.13"):
        stubs = binaries.WHEEL_FOLDER / "pytriton" / "tritonserver" / "python_backend_stubs"
        stub = stubs / version / "triton_python_backend_stub"
        shutil.copy(stub, installation / STUB)
        if version == python_version:
            assert find_tritonserver(tmp_path).backends == installation / "backends"
        else:
            with pytest.raises(
                TritonNotFoundError,
                match=f"made for Python {version}, but this is Python {python_version}: ",
            ):
                find_tritonserver(tmp_path)


@pytest.mark.python_models
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("WHEEL_FOLDER", Path("/nowhere"), r"run `token2wav setup` .*, or set TOKEN2"),
        ("_PYTHON", "3.99", r"Python 3\.99, which .* need: use Python 3\.10 to 3\.13, or for a"),
        (
            "_LIBPYTHON",
            "libpython3.99.so.1.0",
            r"libpython3\.99\.so\.1\.0.* cannot be loaded: install it",
        ),
    ],
)
def test_python_models_on_a_machine_without_a_part(
    name: str, value: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binaries, name, value)
    with pytest.raises(TritonNotFoundError, match=message):
        find_tritonserver(tmp_path)


@pytest.mark.parametrize("name", ["_PYTHON", "_LIBPYTHON"])
def test_other_models_need_no_python_backend(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the native front runs with Python 3.14, and with a Python without a shared library."""
    monkeypatch.setattr(binaries, name, "3.99")
    triton = find_tritonserver(tmp_path, python_models=False)
    assert list(triton.backends.iterdir()) == []
    usage = finished(triton.executable, "--help", env=triton.environment)
    assert "--model-repository" in usage.stdout + usage.stderr
