"""Names of models: the real client of the hub against a server that behaves as the hub does.

The public hub itself is never reached.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from testkit.models.folders import GOLDEN_CODECS, golden_of, write_folder
from testkit.models.golden import TINY
from testkit.models.shards import divide
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.forked_command import run
from testkit.rigs.hub_server import COMMIT, HubServer
from testkit.rigs.processes import finished
from token2wav import Token2Wav
from token2wav import hub as names
from token2wav.hub.errors import as_sentences
from token2wav.known_models import known_models
from token2wav.published import registry

FLOW, OMNI = "acme/tiny-flow", "acme/omni"
PREFIX = "code2wav."
MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Models of the hub: a flow, and a large model with a small decoder."""
    flow = tmp_path / "hub" / FLOW
    flow.mkdir(parents=True)
    for file in TINY.iterdir():
        if file.suffix in (".yaml", ".safetensors"):
            (flow / file.name).write_bytes(file.read_bytes())
    (flow / "llm.pt").write_bytes(b"\1" * MIB)
    omni = tmp_path / "hub" / OMNI
    omni.mkdir()
    (omni / "config.json").write_text(json.dumps({"model_type": "qwen3_omni_moe"}))
    tensors = {
        f"{PREFIX}b": np.arange(1 << 16, dtype=np.float32),
        f"{PREFIX}a": np.arange(1 << 17, dtype=np.float32),
        "thinker.x": np.zeros(1 << 20, np.float32),
    }
    save_file(tensors, omni / "model.safetensors")
    return tmp_path / "hub"


@pytest.fixture
def hub(root: Path) -> Iterator[HubServer]:
    with HubServer.start(root) as server:
        yield server


def pull(
    hub: HubServer, home: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    return run(hub.environment(home, **variables), "pull", *arguments)


def folder_of(done: subprocess.CompletedProcess[str]) -> Path:
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    *_, line = done.stderr.splitlines()
    assert line.startswith("token2wav pull: error: ")
    return line.removeprefix("token2wav pull: error: ")


def test_only_the_files_of_the_decoder(hub: HubServer, tmp_path: Path) -> None:
    folder = folder_of(pull(hub, tmp_path / "home", FLOW))
    files = {file.name for file in folder.iterdir() if not file.name.startswith(".")}
    assert files == {"cosyvoice3.yaml", "flow.safetensors", "hift.safetensors"}
    assert not any("llm.pt" in request for request in hub.requests)


def test_a_name_loads_as_its_folder_does(hub: HubServer, tmp_path: Path) -> None:
    """Loads in a process of its own, because the client reads its variables once."""
    code = (
        "import sys, numpy as np; from token2wav import Token2Wav, Voice\n"
        "one, other = (Token2Wav.load(model) for model in sys.argv[1:])\n"
        "v = Voice(np.zeros(0, int), np.zeros((0, 80), np.float32), np.ones(192, np.float32))\n"
        "tokens = np.arange(30)\n"
        "assert np.array_equal(one.synthesize(tokens, v), other.synthesize(tokens, v))"
    )
    environment = {**os.environ, **hub.environment(tmp_path / "home")}
    done = finished(sys.executable, "-c", code, f"{FLOW}@v1", TINY, env=environment)
    assert done.returncode == 0, done.stderr


def test_of_a_large_file_only_the_tensors_of_the_decoder(hub: HubServer, tmp_path: Path) -> None:
    folder = folder_of(pull(hub, tmp_path / "home", OMNI))
    tensors = load_file(folder / "model.safetensors")
    published = load_file(hub.root / OMNI / "model.safetensors")
    assert tensors.keys() == {name for name in published if name.startswith(PREFIX)}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, published[name])
    assert hub.sent < 1.3 * sum(tensor.nbytes for tensor in tensors.values())


def test_without_ranges_the_whole_file_and_a_word_of_its_size(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.ranges = False
    done = pull(hub, tmp_path / "home", OMNI)
    assert (
        f"token2wav: {OMNI}: the hub's server allows no ranges, so the whole model.safetensors is "
        "fetched, 5.0 MB" in done.stderr.splitlines()
    )
    assert load_file(folder_of(done) / "model.safetensors").keys() == (
        load_file(hub.root / OMNI / "model.safetensors").keys()
    )


def test_of_shards_only_those_with_the_decoder(hub: HubServer, tmp_path: Path) -> None:
    omni = hub.root / OMNI
    whole = load_file(omni / "model.safetensors")
    (omni / "model.safetensors").unlink()
    shards = {"a.safetensors": ["thinker.x"], "b.safetensors": [f"{PREFIX}a", f"{PREFIX}b"]}
    for shard, tensors in shards.items():
        save_file({name: whole[name] for name in tensors}, omni / shard)
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    (omni / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    folder = folder_of(pull(hub, tmp_path / "home", OMNI))
    files = {file.name for file in folder.iterdir() if not file.name.startswith(".")}
    assert files == {"config.json", "model.safetensors.index.json", "b.safetensors"}


def test_a_model_in_a_subfolder(hub: HubServer, tmp_path: Path) -> None:
    inner = hub.root / "acme/whole/speech_tokenizer"
    inner.mkdir(parents=True)
    write_folder("qwen3_tts", inner)
    (inner.parent / "config.json").write_text('{"model_type": "some_language_model"}')
    (inner.parent / "model.safetensors").write_bytes(b"\0" * MIB)
    folder = folder_of(pull(hub, tmp_path / "home", "acme/whole"))
    assert folder.name == "speech_tokenizer"
    assert registry.read_config(folder) == registry.read_config(inner)
    assert hub.sent < MIB


def test_only_the_weights_of_an_attention_block(hub: HubServer, tmp_path: Path) -> None:
    """MOSS-Speech has its decoder in a subfolder, beside weights for full attention."""
    inner = hub.root / "acme/speech/flow"
    write_folder("moss_speech", inner)
    (inner / "flow.pt").write_bytes(b"\0" * MIB)
    (inner.parent / "config.json").write_text('{"quantize_vocab_size": 16384}')
    folder = folder_of(pull(hub, tmp_path / "home", "acme/speech"))
    files = {file.name for file in folder.iterdir() if not file.name.startswith(".")}
    assert files == {"config.yaml", "flow-chunk-5.pt", "hift.pt"}


def test_a_second_pull_fetches_nothing_and_needs_no_network(hub: HubServer, tmp_path: Path) -> None:
    home = tmp_path / "home"
    folder = folder_of(pull(hub, home, OMNI))
    before = hub.sent
    assert folder_of(pull(hub, home, OMNI)) == folder
    assert hub.sent == before
    requests = len(hub.requests)
    assert folder_of(pull(hub, home, f"{OMNI}@{COMMIT}")) == folder  # a commit never changes
    assert len(hub.requests) == requests
    for variables in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        assert folder_of(pull(hub, home, OMNI, **variables)) == folder


@pytest.mark.parametrize("marker", ["", '["", ["con', "{}", '["", [1]]', "[1, []]"])
def test_a_marker_that_is_damaged_is_written_anew(
    marker: str, hub: HubServer, tmp_path: Path
) -> None:
    """A full disk or a lost power supply leaves such a marker."""
    folder = folder_of(pull(hub, tmp_path / "home", FLOW))
    path = folder / ".decoder"
    whole = path.read_text()
    path.write_text(marker)
    assert folder_of(pull(hub, tmp_path / "home", FLOW)) == folder
    assert path.read_text() == whole


def test_a_lost_connection_goes_on_where_it_ended(hub: HubServer, tmp_path: Path) -> None:
    for model in (FLOW, OMNI):
        hub.drop_after, hub.drops_left, hub.sent = MIB // 2, 3, 0
        folder = folder_of(pull(hub, tmp_path / "home", model))
        assert hub.drops_left < 3
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        # The client of the hub loses up to 10 MB with a connection, so here all that was sent.
        lost = 1 << 16 if model == OMNI else hub.drop_after
        assert hub.sent < size + 3 * lost + MIB // 8
    np.testing.assert_array_equal(
        load_file(folder / "model.safetensors")[f"{PREFIX}a"], np.arange(1 << 17)
    )


def test_an_interrupted_pull_goes_on(hub: HubServer, tmp_path: Path) -> None:
    home = tmp_path / "home"
    hub.drop_after, hub.drops_left = 400_000, 1000
    done = pull(hub, home, OMNI)
    assert "the connection was lost; pull again to go on" in refusal(done)
    hub.drop_after, hub.sent = None, 0
    folder = folder_of(pull(hub, home, OMNI))
    assert hub.sent < (folder / "model.safetensors").stat().st_size
    np.testing.assert_array_equal(
        load_file(folder / "model.safetensors")[f"{PREFIX}a"], np.arange(1 << 17)
    )


def test_two_processes_pull_at_once(hub: HubServer, tmp_path: Path) -> None:
    variables = {**os.environ, **hub.environment(tmp_path / "home")}
    command = [sys.executable, "-m", "token2wav", "pull", OMNI]
    pulls = [subprocess.Popen(command, env=variables, stdout=subprocess.PIPE) for _ in range(2)]
    outputs = {process.communicate(timeout=PATIENCE_SECONDS)[0] for process in pulls}
    assert [process.returncode for process in pulls] == [0, 0]
    assert len(outputs) == 1
    decoder = 4 * (1 << 16) + 4 * (1 << 17)
    assert hub.sent < 1.5 * decoder


def test_the_token_goes_to_the_hub_only(hub: HubServer, tmp_path: Path) -> None:
    hub.private = frozenset({OMNI})
    folder_of(pull(hub, tmp_path / "home", OMNI, HF_TOKEN=hub.token))
    assert any("storage" in request for request in hub.requests)
    assert hub.tokens_at_storage == []


REFUSALS: dict[str, tuple[list[str], dict[str, Any], dict[str, str], str]] = {
    "no model": (["acme/none"], {}, {}, "no such folder here, and no such model on http"),
    "private": ([OMNI], {"private": frozenset({OMNI})}, {}, "or a private one: then set HF_TOKEN"),
    "revision": ([f"{OMNI}@v9"], {}, {}, f"{OMNI}@v9: the model has no such revision"),
    "token": ([OMNI], {}, {"HF_TOKEN": "hf_bad"}, "the token was refused; correct HF_TOKEN"),
    "gated": ([OMNI], {"gated": frozenset({OMNI})}, {}, "gated; ask for access at http"),
    "forbidden": ([OMNI], {"status": 403}, {}, "the token gives no access to this model"),
    "too many": ([OMNI], {"status": 429}, {}, "too many requests; wait some minutes"),
    "broken hub": ([OMNI], {"status": 500}, {}, "the hub answered with status 500"),
    "no network": (
        [OMNI],
        {},
        {"HF_ENDPOINT": "http://127.0.0.1:9"},
        "cannot be reached; pull the",
    ),
    "offline": ([OMNI], {}, {"HF_HUB_OFFLINE": "1"}, "not pulled yet, and HF_HUB_OFFLINE forbids"),
    "commit": ([FLOW], {"answer": {"sha": "../../../out"}}, {}, "the commit '../../../out', expec"),
    "no commit": (
        [FLOW],
        {"answer": {"sha": None}},
        {},
        "the commit None, expected 40 hexadecimal",
    ),
    "no checksum": ([FLOW], {"unlisted": ("lfs", "blobId")}, {}, "the hub lists no checksum of co"),
    "nested": ([FLOW], {"raw": b"[" * 100_000}, {}, "cannot be used (RecursionError: "),
    "a list": ([FLOW], {"raw": b"[1]"}, {}, "the answer of http"),
    "files": ([FLOW], {"answer": {"siblings": [1]}}, {}, "the answer of http"),
    "no name": (["acme/a--b"], {}, {}, "acme/a--b: no such folder here, and no name of a model; e"),
    "nearly a name": (
        ["mimmi"],
        {},
        {},
        "neither a folder nor a name of a model; did you mean mimi",
    ),
    "checksum": ([FLOW], {"corrupt": True}, {}, "has another checksum than on the hub; pull again"),
    "front end": ([OMNI, "--front-end"], {}, {}, "it has no networks that make voices, as codecs"),
    "no folder": (["nowhere"], {}, {}, "nowhere: neither a folder nor a name of a model"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_every_failure_is_one_sentence(case: str, hub: HubServer, tmp_path: Path) -> None:
    arguments, settings, variables, sentence = REFUSALS[case]
    for name, value in settings.items():
        setattr(hub, name, value)
    line = refusal(pull(hub, tmp_path / "home", *arguments, **variables))
    assert line.startswith(arguments[0])
    assert sentence in line


def test_repositories_that_cannot_be_used(hub: HubServer, tmp_path: Path) -> None:
    other = hub.root / "acme/other"
    other.mkdir()
    for number, config in enumerate(('{"model_type": "bert"}', "[1]", "[" * 100_000)):
        (other / "config.json").write_text(config)
        assert refusal(pull(hub, tmp_path / f"home-{number}", "acme/other")) == (
            "acme/other: not a model of a family that this project reads"
        )
    omni = hub.root / OMNI
    (omni / "model.safetensors").unlink()
    weight_map = {"weight_map": {f"{PREFIX}a": "lost.safetensors"}}
    (omni / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    assert refusal(pull(hub, tmp_path / "home", OMNI)) == (
        f"{OMNI}: lost.safetensors is missing, but model.safetensors.index.json names it"
    )


@pytest.mark.parametrize("bug", [TypeError, ValueError, LookupError])
def test_a_fault_of_this_project_is_not_blamed_on_the_hub(bug: type[Exception]) -> None:
    with pytest.raises(bug), as_sentences(FLOW):
        raise bug


HEADERS = {
    "no JSON": b"{",
    "too deep": b"[" * 100_000,
    "no object": b"[1]",
    "no entry": b'{"code2wav.a": 1}',
    "no offsets": b'{"code2wav.a": {"dtype": "F32", "shape": [1]}}',
    "beyond the file": b'{"code2wav.a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 400]}}',
    "backwards": b'{"code2wav.a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
}
FILES = {name: len(header).to_bytes(8, "little") + header for name, header in HEADERS.items()}
FILES["too long"] = (1 << 30).to_bytes(8, "little")


@pytest.mark.parametrize("case", FILES)
def test_headers_that_are_wrong(case: str, hub: HubServer, tmp_path: Path) -> None:
    with (hub.root / OMNI / "model.safetensors").open("wb") as file:
        file.write(FILES[case] + bytes(100))
        if case == "too long":
            file.truncate(1 << 31)  # a hole, which takes no room
    done = pull(hub, tmp_path / "home", OMNI)
    assert refusal(done) == f"{OMNI}: model.safetensors: not a safetensors file"
    assert hub.sent < MIB


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"code2wav.a": 1}}'])
def test_an_index_that_is_wrong(index: str, hub: HubServer, tmp_path: Path) -> None:
    (hub.root / OMNI / "model.safetensors").unlink()
    (hub.root / OMNI / "model.safetensors.index.json").write_text(index)
    done = pull(hub, tmp_path / "home", OMNI)
    assert refusal(done) == f"{OMNI}: model.safetensors.index.json is not an index of weights"


def test_no_file_outside_the_folder(hub: HubServer, tmp_path: Path) -> None:
    """A hostile hub lists names that lead out of the folder. They are no files of the model."""
    names = ("../x.safetensors", "/x.yaml", "a/../../cosyvoice2.yaml", "..", "a//cosyvoice2.yaml")
    hub.answer["siblings"] = [{"rfilename": name, "size": 1, "blobId": "0" * 40} for name in names]
    sentence = refusal(pull(hub, tmp_path / "home", FLOW))
    assert sentence == f"{FLOW}: not a model of a family that this project reads"
    assert not any("x." in request for request in hub.requests)


@pytest.mark.parametrize(("name", "index"), [("moss", False), ("qwen3_tts", True)])
def test_shards_of_a_codec(name: str, index: bool, hub: HubServer, tmp_path: Path) -> None:
    """Of Qwen3-TTS only tensors of the decoder are fetched, of MOSS whole files."""
    published = hub.root / "acme" / name
    published.mkdir()
    golden = golden_of(name)
    divide(write_folder(name, published) / "model.safetensors", index=index)
    pulled = folder_of(pull(hub, tmp_path / "home", f"acme/{name}"))
    audio = Token2Wav.load(pulled).synthesize(golden["codes"].numpy())
    np.testing.assert_allclose(audio, golden["audio"].numpy(), atol=1e-3)


def test_a_full_disk(hub: HubServer, tmp_path: Path) -> None:
    """The cache is on a file system of 512 KiB, in a namespace of the mounts."""
    home = tmp_path / "home"
    home.mkdir()
    probe = ["unshare", "--mount", "true"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    command = f"mount -t tmpfs -o size=512k tmpfs {home} && exec {sys.executable} -m token2wav pull"
    for model in (FLOW, OMNI):
        environment = {**os.environ, **hub.environment(home)}
        done = finished("unshare", "--mount", "sh", "-c", f"{command} {model}", env=environment)
        assert "the disk is full (" in refusal(done)


def test_aliases_are_names_too() -> None:
    assert names._name("Mimi") == ("kyutai/mimi", "main")
    for known in known_models():
        assert names._name(known.alias) == (known.repo, "main")
        assert names._name(f"{known.alias}@v2") == (known.repo, "v2")
        assert names._name(known.repo) == (known.repo, "main")


def test_paths_are_no_names() -> None:
    for path in ("./model", "../model", "/acme/model", "path/to/model"):
        assert names._name(path) is None


def test_a_folder_is_preferred_to_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "model").mkdir(parents=True)
    assert names.model_folder("acme/model") == Path("acme/model")


@pytest.mark.parametrize("name", GOLDEN_CODECS)
def test_what_is_pulled_is_enough_for_every_codec(
    name: str, hub: HubServer, tmp_path: Path
) -> None:
    published = hub.root / "acme" / "codec"
    (tmp_path / "written").mkdir()
    written = write_folder(name, tmp_path / "written")
    written.rename(published)
    (published / "README.md").write_text("# A page")
    pulled = folder_of(pull(hub, tmp_path / "home", "acme/codec"))
    assert not (pulled / "README.md").exists()
    assert str(Token2Wav.load(pulled).config) == str(Token2Wav.load(published).config)
