"""Allowed imports: light packages stay light, and library modules import only from lower floors."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import token2wav

ROOT = Path(token2wav.__file__).parent
FOREIGN = {
    "triton_python_backend_utils",
    "tritonclient",
    "tritonserver",
    "pytriton",
    "token2wav_client",
    "token2wav_export",
    "token2wav_server",
}

# From the roof to the ground: a module imports from its own package or from lower floors, and not
# from another package on its floor.
FLOORS = [
    {"__main__"},
    {"commands", "model"},
    {"assembly", "hub", "serving"},
    {"backends", "families"},
    {"exported", "stages"},
    {"kernels"},
    {"execution"},
    {"cache", "voice"},
    {"networks"},
    {"layers", "published"},
    {"config"},
    {"errors", "known_models", "plugins"},
]
GATEWAY_FLOORS = [
    {"cli"},
    {"app", "server"},
    {"doors"},
    {"gateway"},
    {"speech"},
    {"voices", "words"},
    {"edge"},
    {"access", "encoding", "metrics", "tracing"},
    {"settings"},
    {"forms"},
    {"errors", "log"},
]


# Families whose models are variants of the models of another family, and this other family
VARIANTS = {
    ("chatterbox", "cosyvoice2"),
    ("qwen25_omni", "cosyvoice3"),
    ("qwen25_omni", "streamflow"),
    ("stepaudio2", "cosyvoice2"),
    ("streamflow", "cosyvoice3"),
}


def modules_of(package: Path) -> dict[str, Path]:
    """Returns the files of a package by the names of their modules."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


MODULES = modules_of(ROOT)


def imports_of(name: str, modules: Mapping[str, Path] = MODULES) -> set[str]:
    """Returns every module that a file imports, also inside functions and for type checking."""
    imports: set[str] = set()
    for node in ast.walk(ast.parse(modules[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                imports.add(full if full in modules else node.module)
    return imports


def package_of(name: str) -> str:
    """Returns the package of a module, or the name of a module that is in no package."""
    return name.split(".")[1]


def floor(package: str, floors: Sequence[set[str]]) -> int:
    """Returns the height of the floor of a package above the ground."""
    [height] = [height for height, packages in enumerate(reversed(floors)) if package in packages]
    return height


# the package itself only exports the names of its modules
LIBRARY = [name for name in MODULES if name != "token2wav"]


@pytest.mark.parametrize(
    ("folder", "floors"),
    [(ROOT, FLOORS), (ROOT.parent / "gateway" / "token2wav_gateway", GATEWAY_FLOORS)],
    ids=["token2wav", "token2wav_gateway"],
)
def test_packages_import_from_lower_floors_only(folder: Path, floors: Sequence[set[str]]) -> None:
    modules = modules_of(folder)
    pairs = {
        (package_of(name), package_of(imported))
        for name in modules.keys() - {folder.name}
        for imported in imports_of(name, modules)
        if imported.startswith(f"{folder.name}.")
    }
    assert {
        pair
        for pair in pairs
        if pair[0] != pair[1] and floor(pair[0], floors) <= floor(pair[1], floors)
    } == set()


def test_a_family_imports_only_the_families_that_its_models_are_variants_of() -> None:
    def family(name: str) -> str:
        package = name.partition("token2wav.families.")[2].partition(".")[0]
        return package if (ROOT / "families" / package).is_dir() else ""

    pairs = {(family(name), family(imported)) for name in LIBRARY for imported in imports_of(name)}
    assert {pair for pair in pairs if all(pair) and pair[0] != pair[1]} == VARIANTS


@pytest.mark.parametrize(
    "package",
    ["token2wav", *(f"{name}/token2wav_{name}" for name in ("client", "gateway", "server"))],
)
def test_nothing_imports_in_a_circle(package: str) -> None:
    modules = modules_of(ROOT.parent / package)
    del modules[Path(package).name]  # it only exports the names of its modules
    graph = {name: imports_of(name, modules) & modules.keys() for name in modules}
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules)


def top_folders() -> dict[str, set[str]]:
    """Returns the folders of the project, each with the folders that its files import from."""
    root = ROOT.parent
    places = {path.parent.name: path.parts[len(root.parts)] for path in root.glob("*/*/py.typed")}
    folders = {path.parts[len(root.parts)] for path in root.glob("[!.]*/**/*.py")}
    imports: dict[str, set[str]] = {}
    for folder in folders - {"out", "build"}:
        files = modules_of(root / folder)
        tops = {name.split(".")[0] for module in files for name in imports_of(module, files)}
        imports[folder] = {places.get(top, top) for top in tops} & folders - {folder}
    return imports


def test_no_two_folders_import_each_other() -> None:
    imports = top_folders()
    assert {"client", "lab", "testkit", "tests"} <= imports.keys()
    assert list(TopologicalSorter(imports).static_order())  # raises an error for a circle
    assert imports["tests"] & {"lab"} == set()
    assert [folder for folder, names in imports.items() if "tests" in names] == []


def test_the_library_does_not_import_server_or_client() -> None:
    imports = {(name, imported) for name in MODULES for imported in imports_of(name)}
    assert {pair for pair in imports if pair[1].partition(".")[0] in FOREIGN} == set()


@pytest.mark.parametrize("package", ["exporters", "server"])
def test_only_families_know_families(package: str) -> None:
    for path in sorted((ROOT.parent / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"token2wav\.families\.", text), path


@pytest.mark.parametrize(
    "name",
    [
        "serving.door.sequences",
        "serving.door.voice_registry",
    ],
)
def test_modules_without_tensors_do_not_import_torch(name: str) -> None:
    assert loaded_after(f"import token2wav.{name}") & {"torch", "safetensors"} == set()


def test_the_launcher_checks_a_model_folder_without_torch() -> None:
    model = ROOT.parent / "tests" / "data" / "tiny"
    serve = (
        f"assert main([{str(model)!r}, '--model-repository', 'nowhere', "
        "'--canary-seconds', '0']) == 3"
    )
    assert "torch" not in loaded_after(f"from token2wav_server.cli import main; {serve}")


@pytest.mark.parametrize(
    ("package", "heavy"),
    [
        ("token2wav", {"torch", "yaml", "safetensors", "tritonclient"}),
        ("token2wav_client", {"token2wav", "torch", "yaml"}),
    ],
)
def test_importing_a_package_is_light(package: str, heavy: set[str]) -> None:
    assert loaded_after(f"import {package}") & heavy == set()


def loaded_after(statement: str) -> set[str]:
    """Returns the top-level modules in a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_lazy_names_are_all_there_and_others_are_not() -> None:
    for name in token2wav.__all__:
        assert getattr(token2wav, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = token2wav.Nonsense
