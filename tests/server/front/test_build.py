"""Command `token2wav setup`: it installs tritonserver, and compiles the native front once for its
sources. The library of the front may also come with the package.
"""

from __future__ import annotations

import platform
import re
import shutil
import sys
from pathlib import Path

import pytest

from token2wav.commands import main
from token2wav_server import setup
from token2wav_server.front import build
from token2wav_server.launcher import binaries

LESS = "so the server uses the Python front, which takes in fewer messages a second"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources without libraries, and no library that was compiled before."""
    folder = tmp_path / "native"
    shutil.copytree(build.SOURCES, folder, ignore=shutil.ignore_patterns(*build.MACHINES))
    monkeypatch.setattr(build, "SOURCES", folder)
    for module in (build, setup):
        monkeypatch.setattr(module, "COMPILED_FOLDER", tmp_path / "compiled")
    return folder


def test_setup_compiles_again_only_for_other_sources(
    sources: Path, compiler: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "compiled"
    assert main(["setup"]) == 0
    assert f"token2wav setup: compiling the native front into {folder}\n" in capsys.readouterr().out
    [first] = folder.iterdir()
    assert build.native_front() == first
    assert main(["setup"]) == 0
    assert f"token2wav setup: the native front is already in {folder}\n" in capsys.readouterr().out
    with (sources / "text.cc").open("a") as source:
        source.write("// changed\n")
    assert build.native_front() is None
    assert main(["setup"]) == 0
    [second] = folder.iterdir()
    assert build.native_front() == second != first


def test_the_library_needs_little(native_library: Path) -> None:
    """A tritonserver has another C++ library, or none."""
    content = native_library.read_bytes()
    assert set(re.findall(rb"[\w+-]+\.so\.\d+", content)) <= {
        b"libc.so.6",
        b"libpthread.so.0",
        b"libm.so.6",
        b"libdl.so.2",
        b"ld-linux-x86-64.so.2",
        b"ld-linux-aarch64.so.1",
    }


def test_the_recipe_of_cosyvoice_is_refused_where_numpy_1_does_not_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 13, 0, "final", 0))
    assert setup.main(["--recipe"]) == 3
    assert capsys.readouterr().err == (
        "token2wav setup: error: --recipe needs Python 3.10, 3.11 or 3.12, because numpy==1.26.4 "
        "exists for no later one\n"
    )


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("has_stub", [True, False], ids=["3.13", "3.14"])
def test_setup_without_a_compiler(
    has_stub: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(setup, "wheel_has_stub", lambda: has_stub)
    assert main(["setup"]) == (0 if has_stub else 3)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    none = f"so no server runs with Python {version}, which has no Python front"
    assert capsys.readouterr().out.endswith(
        f"token2wav setup: no C++ compiler found, {LESS if has_stub else none}; install g++ and "
        "run `token2wav setup` again\n"
    )
    assert build.native_front() is None


def test_setup_with_a_compiler_that_fails(
    sources: Path,
    compiler: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(setup, "wheel_has_stub", lambda: True)
    with (sources / "text.cc").open("a") as source:
        source.write("#error broken\n")
    assert main(["setup"]) == 0
    shown = capfd.readouterr().err
    assert shown.startswith(f"token2wav setup: the native front was not compiled, {LESS}:\n")
    assert "#error broken" in shown
    assert list((tmp_path / "compiled").iterdir()) == []


def test_a_library_of_the_package_is_used(sources: Path, tmp_path: Path) -> None:
    shipped = sources / platform.machine()
    shipped.mkdir()
    library = shipped / build._name()
    library.touch()
    assert build.native_front() == library
    compiled = tmp_path / "compiled"
    compiled.mkdir()
    (compiled / library.name).touch()
    assert build.native_front() == compiled / library.name
    library.unlink()
    (compiled / library.name).rename(compiled / "libtriton_token2wav-0000.so")
    assert build.native_front() is None, "of other sources"


def test_setup_repeats_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The environment of the tests has tritonserver already."""
    assert main(["setup"]) == 0
    assert capsys.readouterr().out.startswith(
        f"token2wav setup: {binaries.WHEEL} is already in {binaries.WHEEL_FOLDER}\n"
    )


def test_setup_with_a_pip_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup, "WHEEL_FOLDER", tmp_path / "triton")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert main(["setup"]) == 3
    shown = capfd.readouterr()
    assert shown.out.startswith(f"token2wav setup: installing {binaries.WHEEL} into {tmp_path}")
    assert shown.err.endswith(
        f"token2wav setup: error: {binaries.WHEEL} was not installed, see above\n"
    )
