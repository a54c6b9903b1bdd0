"""Check of the images: they are built on stand-ins for their bases, run as docker-compose.yml says,
and measured.

    .venv/bin/python -m scripts.check_images [--folder FOLDER]

It needs root, and buildah and debootstrap of Debian or Ubuntu; no daemon, no registry. The
stand-ins have the layout of the real bases: Debian 12 with its Python 3.11 for python:slim, the
same with /opt/tritonserver for NVIDIA's. All images have torch for the CPU. The builds use this
machine's configuration of pip: its indexes and certificates.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import soundfile

from scripts.image import ROOT, Image, call
from testkit.rigs.gateway_rig import serving as asgi_server
from token2wav import Token2Wav, Voice
from token2wav_server import Ports
from token2wav_server.demo import language_model

MODEL = ROOT / "tests" / "data" / "tiny"
SPEECH = ROOT / "tests" / "data" / "demo"
SUITE, PYTHON = "bookworm", "3.11"
PACKAGES = ["ca-certificates", "python3", "python3-pip", f"libpython{PYTHON}"]
TORCH, TRITON = "torch==2.13.0+cpu", "nvidia-pytriton==0.7.0"
USER = 10001
TOKENS_PER_SECOND = 25
WAV_HEADER_BYTES = 1000  # far more than there are before the first sample
# of a stream against the library's: batches differ in the order of sums, and F0 adds up to phase
MIN_SNR_DB = 40.0
PATIENCE_SECONDS = 300.0
STAND_INS = f"""
FROM scratch AS python
COPY debian /

FROM python AS triton
RUN python3 -m pip install --no-deps --no-cache-dir --target /tmp/wheel {TRITON} \\
    && mkdir -p /opt/tritonserver/backends/python \\
    && cd /tmp/wheel/pytriton/tritonserver \\
    && mv bin /opt/tritonserver/ \\
    && mv backends/python/* python_backend_stubs/{PYTHON}/* /opt/tritonserver/backends/python/ \\
    && mv /tmp/wheel/nvidia_pytriton.libs /opt/tritonserver/lib \\
    && rm -r /tmp/wheel
ENV LD_LIBRARY_PATH=/opt/tritonserver/lib
"""
# Files that no image may have: pip and its caches, sources, lists of packages, and, in an image
# with torch for the CPU, CUDA.
WASTE = [
    "opt/token2wav/venv/bin/pip*",
    "root/.cache",
    "src",
    "tmp/*",
    "usr/bin/*gcc*",
    "var/lib/apt/lists/*_*",
    "wheels",
]
CUDA = [
    "opt/token2wav/venv/lib/*/site-packages/nvidia",
    "opt/token2wav/venv/lib/*/site-packages/triton",
]
# The GPU is made up, so no kernels can be compiled for it. All other parts run as on a real GPU.
ENGINES_FOR_L4 = """
import sys
sys.path.insert(0, "/opt/token2wav/docker")
import engines
engines.own_target = lambda: {"compute_capability": "8.9", "gpu": "NVIDIA L4"}
engines.compile_kernels = lambda *_: None
sys.exit(engines.main())
"""


def say(text: str) -> None:
    print(f"check: {text}", flush=True)


def choose_storage(folder: Path) -> str:
    """Puts buildah's storage into a folder for all later commands, and returns its driver."""
    os.environ |= {
        "BUILDAH_ISOLATION": "chroot",
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
    }
    # the latter copies the whole image for every layer, but works everywhere
    for driver in ("overlay", "vfs"):
        paths = f'graphroot = "{folder / driver}"\nrunroot = "{folder / "run"}"\n'
        (folder / "storage.conf").write_text(f'[storage]\ndriver = "{driver}"\n{paths}')
        if subprocess.run(["buildah", "info"], capture_output=True, check=False).returncode == 0:
            return driver
    sys.exit("check: buildah info fails, also with the storage driver vfs")


def pip_mounts(folder: Path) -> list[str]:
    """Returns options of buildah that mount this machine's configuration of pip and torch for the
    CPU.
    """
    wheels = folder / "wheels"
    if not wheels.exists():
        target = ["--python-version", PYTHON, "--only-binary", ":all:", "--dest", str(wheels)]
        index = "https://download.pytorch.org/whl/cpu"
        pip = [sys.executable, "-m", "pip", "--retries", "1", "--timeout", "15"]
        call(*pip, "download", "--no-deps", *target, "--extra-index-url", index, TORCH)
    settings: dict[str, list[str]] = {"find-links": []}
    for line in call(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = shlex.split(value)[0].split()
    settings["find-links"].append(str(wheels))
    lines = [f"{name} = {' '.join(values)}\n" for name, values in settings.items()]
    (folder / "pip.conf").write_text(f"[global]\n{''.join(lines)}")
    values = [value for values in settings.values() for value in values]
    paths = {Path(value) for value in values if value.startswith("/")}
    for value in settings.get("index-url", []) + settings.get("extra-index-url", []):
        if value.startswith("file:"):  # its pages name files beside it
            paths.add(Path(urllib.parse.urlparse(value).path).parent)
    mounts = {path: path for path in paths if path.exists()} | {
        folder / "pip.conf": Path("/etc/pip.conf")
    }
    return [f"--volume={source}:{target}:ro" for source, target in mounts.items()]


def build_stand_ins(folder: Path, options: list[str]) -> None:
    """Makes the images stand-in:python and stand-in:triton."""
    debian = folder / "debian"
    if not debian.exists():
        say(f"makes a stand-in for the bases: {SUITE} with {' '.join(PACKAGES)}")
        half = folder / "debian.half"
        shutil.rmtree(half, ignore_errors=True)
        call("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, half)
        call("find", half / "var/lib/apt/lists", half / "var/cache/apt", "-type", "f", "-delete")
        (half / f"usr/lib/python{PYTHON}/EXTERNALLY-MANAGED").unlink()  # no other image has that
        half.rename(debian)
    (folder / "stand_ins.Dockerfile").write_text(STAND_INS)
    for name in ("python", "triton"):
        target = ["--target", name, "--tag", f"localhost/stand-in:{name}"]
        file = f"--file={folder / 'stand_ins.Dockerfile'}"
        call("buildah", "build", "--layers", *options, file, *target, folder)


def build(options: list[str]) -> None:
    """Builds all images by the script that `make images` runs."""
    bases = {
        "PYTHON_IMAGE": "localhost/stand-in:python",
        "TRITON_IMAGE": "localhost/stand-in:triton",
    }
    arguments = [f"--build-arg={name}={value}" for name, value in bases.items()]
    # Nothing of that index is needed: the wheel lies beside the others.
    arguments.append("--build-arg=CPU_TORCH_INDEX=file:///nowhere")
    # From the cache, buildah 1.28 mounts an earlier layer of a stage than the one that is asked
    # for.
    arguments += ["--layers", "--no-cache", "--pull-never"]
    call(ROOT / "scripts" / "images.sh", *arguments, *options, stderr=subprocess.STDOUT)


@contextmanager
def serving(
    image: Image, binds: dict[str, Path], log: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Ports]]:
    """Runs the server of an image until it is ready, and to the end of the block."""
    ports = Ports.free()
    numbers = [f"--{name}-port={port}" for name, port in vars(ports).items()]
    command = image.command([*image.service["command"], *numbers], binds)
    with (
        log.open("wb") as file,
        subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process,
    ):
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while "token2wav: ready, " not in log.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(
                        f"check: the server of {image.name} does not "
                        f"start\n{log.read_text()[-4000:]}"
                    )
                time.sleep(0.2)
            yield process, ports
        finally:
            process.kill()


def check_server(image: Image, client: Image, files: Path, binds: dict[str, Path]) -> None:
    """Runs the server of an image with the client's: health check, a stream, and a stream through a
    drain.
    """
    settings = files / "server.yaml"
    # Audio of provisional chunks depends on the pace of tokens, and could not be compared.
    settings.write_text(
        (ROOT / "docker" / "server.yaml").read_text() + "stream: {first_tokens: 0}\n"
    )
    binds = {"/model": MODEL, "/opt/token2wav/docker/server.yaml": settings, **binds}
    log = files / "server.log"
    with serving(image, binds, log) as (process, ports):
        status = Path(f"/proc/{process.pid}/status").read_text()
        if f"Uid:\t{USER}\t{USER}" not in status or "CapBnd:\t0000000000000000" not in status:
            sys.exit(f"check: the server of {image.name} has privileges:\n{status}")
        url = f"127.0.0.1:{ports.grpc}"
        health = image.service["healthcheck"]["test"][1:]
        program = shutil.which(health[0], path=str(image.root / "opt/token2wav/venv/bin"))
        if program is None:
            sys.exit(f"check: {health[0]} is not in {image.name}")
        inside = "/" + str(Path(program).relative_to(image.root))
        words = [url if word.endswith(":8001") else word for word in health[1:]]
        call(*image.command([inside, *words], binds))
        say(f"{image.name}: serves as user {USER}, its root read-only; the health check passes")
        speak = ["synth", "--url", url, "--tokens", "tokens.npy", "--voice", "voice.safetensors"]
        speak += ["--quiet", "--audio-format", "float32"]
        mounts = {"/files": files}
        call(*client.command(["health", "--url", url], mounts, ["/files"]))
        call(*client.command([*speak, "--out", "out.wav"], mounts, ["/files"]))
        say(
            f"{image.name}: a stream to {client.name} equals the library's, "
            f"{snr_db(files / 'out.wav'):.0f} dB"
        )
        paced = [*speak, "--out", "drained.wav", "--rate", str(TOKENS_PER_SECOND)]
        drained = files / "drained.wav"
        drained.unlink(missing_ok=True)
        with subprocess.Popen(client.command(paced, mounts, ["/files"])) as speaker:
            while speaker.poll() is None and not (
                drained.exists() and drained.stat().st_size > WAV_HEADER_BYTES
            ):
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            codes = speaker.wait(PATIENCE_SECONDS), process.wait(PATIENCE_SECONDS)
        if codes != (0, 0) or "draining" not in log.read_text():
            sys.exit(
                f"check: client and server ended with {codes} after "
                f"SIGTERM\n{log.read_text()[-4000:]}"
            )
        say(f"{image.name}: SIGTERM lets a stream end, {snr_db(drained):.0f} dB")


def check_gateway(image: Image, server: Image, files: Path) -> None:
    """Runs the gateway's image with the server's and a language model server on this machine, and
    compares a text that it speaks with the library's audio of the same tokens.
    """
    voices = files / "voices"
    voices.mkdir()
    shutil.copy(SPEECH / "voice.safetensors", voices / "demo.safetensors")
    tokens = np.load(SPEECH / "tokens.npy")
    gateway_settings, server_settings = files / "gateway.yaml", files / "server.yaml"
    binds = {"/model": MODEL, "/opt/token2wav/docker/server.yaml": server_settings}
    with (
        asgi_server(language_model.create_app(lambda _: tokens, 1000.0)) as model_port,
        serving(server, binds, files / "gateway_server.log") as (_, ports),
    ):
        gateway_ports = Ports.free()
        gateway_settings.write_text(
            f"language_model: {{url: 'http://127.0.0.1:{model_port}/v1'}}\n"
            f"speech_server: {{url: '127.0.0.1:{ports.grpc}'}}\n"
            "voices: {folder: /voices}\n"
        )
        numbers = [f"--port={gateway_ports.http}", f"--metrics-port={gateway_ports.metrics}"]
        words = [*image.service["command"], *numbers]
        mounts = {"/settings/gateway.yaml": gateway_settings, "/voices": voices}
        with (
            subprocess.Popen(image.command(words, mounts, ["/voices"])) as process,
            httpx.Client(base_url=f"http://127.0.0.1:{gateway_ports.http}", timeout=60) as http,
        ):
            try:
                deadline = time.monotonic() + PATIENCE_SECONDS
                while not is_ready(http):
                    if process.poll() is not None or time.monotonic() > deadline:
                        sys.exit(f"check: the gateway of {image.name} does not become ready")
                    time.sleep(0.5)
                body = {"model": "tts-1", "voice": "demo", "input": "x", "response_format": "wav"}
                answer = http.post("/v1/audio/speech", json=body)
                if answer.status_code != 200:
                    sys.exit(f"check: the gateway of {image.name} answers {answer.text}")
                heard = files / "gateway.wav"
                heard.write_bytes(answer.content)
                say(f"{image.name}: a text equals the library's, {snr_db(heard):.0f} dB")
            finally:
                process.terminate()
                process.wait(PATIENCE_SECONDS)


def is_ready(http: httpx.Client) -> bool:
    """Returns whether a gateway answers that it and its servers are ready."""
    try:
        return http.get("/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def check_contents(image: Image) -> None:
    """Checks that nothing is in an image that only building it needed."""
    if waste := [str(path) for pattern in WASTE + CUDA for path in image.root.glob(pattern)]:
        sys.exit(f"check: {image.name} has {', '.join(waste)}")


def snr_db(wav: Path) -> float:
    """Returns the SNR of received audio against the library's stream of the same tokens."""
    heard, _ = soundfile.read(wav, dtype="float32")
    tokens, voice = np.load(SPEECH / "tokens.npy"), Voice.load(SPEECH / "voice.safetensors")
    with Token2Wav.load(MODEL).stream(voice) as stream:
        chunks = [*stream.push(tokens), *stream.finish()]
    expected = np.concatenate([chunk.audio for chunk in chunks])
    if heard.shape != expected.shape:
        sys.exit(f"check: {wav.name} has shape {heard.shape}, the library's audio {expected.shape}")
    noise = np.square(heard - expected, dtype=np.float64).sum()
    ratio_db = float(10 * np.log10(np.square(expected, dtype=np.float64).sum() / max(noise, 1e-30)))
    if ratio_db < MIN_SNR_DB:
        sys.exit(
            f"check: {wav.name} is {ratio_db:.1f} dB from the library's audio; at least "
            f"{MIN_SNR_DB} dB is needed"
        )
    return ratio_db


def check_engines(image: Image, volume: Path, files: Path) -> None:
    """Builds engines in an image: for this machine, and with TensorRT-RTX for an L4."""
    inside = "/opt/token2wav/docker/server.yaml"
    python = "/opt/token2wav/venv/bin/python"
    for_l4 = [python, "-c", ENGINES_FOR_L4, "build", "/engines"]
    for backend, words in (
        ("onnx", ["engines"]),
        ("tensorrt", [*for_l4, "--model", "/model", "--config", inside]),
    ):
        settings = files / f"{backend}.yaml"
        settings.write_text(f"runtime: {{backend: {backend}}}\n")
        binds = {"/model": MODEL, "/engines": volume, inside: settings}
        call(*image.command(words, binds, ["/engines"]), stderr=subprocess.STDOUT)
    for folder in sorted(volume.iterdir()):
        listed = ", ".join(
            f"{file.name} {file.stat().st_size / 1e6:.0f} MB" for file in sorted(folder.iterdir())
        )
        say(f"{image.name}: engines in {folder.name}: {listed}")


def run(folder: Path) -> None:
    """Builds, runs and measures everything."""
    driver = choose_storage(folder)
    options = pip_mounts(folder)
    build_stand_ins(folder, options)
    say(f"builds all images with {call('buildah', '--version').strip()}, storage driver {driver}")
    build(options)
    files, volume = folder / "files", folder / "engines"
    for directory in (files, volume):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
    for source in SPEECH.iterdir():
        shutil.copy(source, files)
    for directory in (files, volume):
        os.chown(directory, USER, USER)
    with Image.mounted("token2wav-client:0.1.0", "client") as client:
        check_contents(client)
        with Image.mounted("token2wav-server:0.1.0-cpu", "server-cpu") as image:
            check_contents(image)
            check_server(image, client, files, {})
            with Image.mounted("token2wav-gateway:0.1.0", "gateway") as gateway:
                check_contents(gateway)
                check_gateway(gateway, image, files)
        with Image.mounted("token2wav-server:0.1.0", "server") as image:
            check_contents(image)
            check_engines(image, volume, files)
            check_server(image, client, files, {"/engines": volume})
    print(call("buildah", "images"))


def main() -> None:
    """Runs the check; ends with status 1 and a sentence if anything is not as it should be."""
    parser = argparse.ArgumentParser(
        description="Build the images on stand-ins for their base images, and run them."
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder that keeps bases and images for the next run (default: none)",
    )
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("check: needs root")
    programs = ("buildah", "debootstrap", "unshare", "setpriv")
    if absent := [program for program in programs if shutil.which(program) is None]:
        sys.exit(
            f"check: the check needs {', '.join(absent)}; run: apt-get install buildah debootstrap "
            "util-linux"
        )
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="token2wav-images-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)  # for the user in the containers
        try:
            run(folder.resolve())
        finally:
            # all that buildah leaves lie below this one
            mounts = folder.resolve() / "overlay" / "overlay"
            subprocess.run(["umount", "--recursive", "--quiet", mounts], check=False)


if __name__ == "__main__":
    main()
