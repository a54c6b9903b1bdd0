#!/usr/bin/env bash
# Builds wheel and sdist into dist/, with the native front for x86_64 and aarch64, and tests the wheel in a clean
# environment for each extra that a user installs. Then the client of one environment sends a request to the server of
# another, which runs in an empty folder with tritonserver from `token2wav setup`, and pulls its model by name from a hub
# on this machine. Library and exporter also run with the lowest versions that pyproject.toml allows. Each dependency must
# have a wheel for each Python. dist/ receives a list of the installed packages of each environment, with licences
# (CycloneDX). KEEP=1 keeps the environments in out/dist.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH # else pip takes the checkout for the installed package
readonly BIN=$PWD/.venv/bin ENVIRONMENTS=$PWD/out/dist PORT=${PORT:-18100}
readonly TORCH=torch==$("$BIN/python" -c "import torch; print(torch.__version__)")
readonly TORCH_INDEX=https://download.pytorch.org/whl/cpu
server=
hub=

main() {
    rm -rf dist "$ENVIRONMENTS"
    mkdir -p "$ENVIRONMENTS"
    trap cleanup EXIT
    "$BIN/python" server/token2wav_server/front/build.py >"$ENVIRONMENTS/front.log" 2>&1 || fail "$ENVIRONMENTS/front.log"
    "$BIN/python" -m build --outdir dist . >"$ENVIRONMENTS/build.log" 2>&1 || fail "$ENVIRONMENTS/build.log"
    wheel=$(echo dist/token2wav-*.whl)
    try client token2wav_client "import importlib.util as u; assert u.find_spec('torch') is None"
    try voice token2wav_voice "import importlib.util as u; assert u.find_spec('torch') is None"
    try gateway token2wav_gateway.cli "import importlib.util as u; assert u.find_spec('torch') is None"
    try riva token2wav_gateway.doors.riva_server "import importlib.util as u; assert u.find_spec('torch') is None"
    try align token2wav_gateway.words.pocketsphinx_aligner
    try normalise token2wav_gateway.words.wetext_normaliser
    try onnx onnxruntime
    try onnx-gpu onnxruntime
    try server token2wav "from token2wav_server.front.build import native_front; assert native_front()"
    try export token2wav_export
    try up token2wav_server.up "from token2wav_server.demo import MODEL, PROMPT; assert MODEL.is_dir() and PROMPT.is_file()"
    speak
    least
    wheels
    for extra in client gateway server export; do
        "$BIN/cyclonedx-py" environment -o "dist/sbom-$extra.json" "$ENVIRONMENTS/$extra/bin/python"
    done
    ls -sh dist
}

# Installs the wheel with an extra, and imports a module.
try() {
    local extra=$1 module=$2 check=${3:-} python=$ENVIRONMENTS/$1/bin/python
    "$BIN/python" -m venv "$ENVIRONMENTS/$extra"
    case $extra in
        # The torch of .venv: else pip would bring the one for CUDA, several gigabytes each time.
        server | export | up) install "$extra" --no-deps --extra-index-url "$TORCH_INDEX" "$TORCH" ;;
    esac
    install "$extra" --constraint constraints.txt "$wheel[$extra]"
    (cd / && "$python" -c "import $module; $check")
    echo "dist: $extra: $(du -sh "$ENVIRONMENTS/$extra" | cut -f1)"
}

install() {
    local environment=$1
    shift
    "$ENVIRONMENTS/$environment/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile "$@"
}

# A server from its wheel, the client of another environment, and a voice that a third one makes.
speak() {
    local demo=$PWD/examples/demo_voice model=$PWD/examples/demo_voice/model voice=$ENVIRONMENTS/voice.safetensors
    "$ENVIRONMENTS/voice/bin/token2wav" voice create --model "$model" --wav "$demo/recordings/prompt.wav" \
        --out "$voice"
    "$ENVIRONMENTS/server/bin/token2wav" setup
    "$ENVIRONMENTS/server/bin/python" -m pip check
    publish "$model" dist/demo-voice
    "$ENVIRONMENTS/server/bin/token2wav" models >/dev/null
    mkdir "$ENVIRONMENTS/empty"
    (
        cd "$ENVIRONMENTS/empty"
        export PATH=/usr/bin:/bin HF_ENDPOINT HF_HOME=$ENVIRONMENTS/cache HF_HUB_DISABLE_XET=1
        "$ENVIRONMENTS/server/bin/token2wav" doctor dist/demo-voice --grpc-port "$PORT" --http-port $((PORT + 1)) \
            --metrics-port $((PORT + 2)) || exit
        exec "$ENVIRONMENTS/server/bin/token2wav" serve dist/demo-voice \
            --grpc-port "$PORT" --http-port $((PORT + 1)) --metrics-port $((PORT + 2)) >"$ENVIRONMENTS/server.log" 2>&1
    ) &
    server=$!
    timeout 300 bash -c "until grep -qs 'token2wav: ready' '$ENVIRONMENTS/server.log'; do sleep 1; done" \
        || fail "$ENVIRONMENTS/server.log"
    seq 100 160 | "$ENVIRONMENTS/client/bin/token2wav" synth --url "127.0.0.1:$PORT" --tokens - \
        --voice "$voice" --out "$ENVIRONMENTS/spoken.wav"
    "$ENVIRONMENTS/client/bin/token2wav" bench --url "127.0.0.1:$PORT" --voice "$voice" --streams 1 2 --rounds 1 \
        --out "$ENVIRONMENTS/bench.json"
}

# Serves a model folder under a name, as the Hugging Face Hub does, and sets HF_ENDPOINT.
publish() {
    local folder=$ENVIRONMENTS/hub/$2
    mkdir -p "$(dirname "$folder")"
    cp -r "$1" "$folder"
    "$BIN/python" - "$ENVIRONMENTS/hub" >"$ENVIRONMENTS/hub.url" <<'PYTHON' &
import sys, time
from pathlib import Path

from testkit.rigs.hub_server import HubServer

with HubServer.start(Path(sys.argv[1])) as hub:
    print(hub.url, flush=True)
    time.sleep(3600)
PYTHON
    hub=$!
    timeout 60 bash -c "until [[ -s '$ENVIRONMENTS/hub.url' ]]; do sleep 0.1; done"
    HF_ENDPOINT=$(<"$ENVIRONMENTS/hub.url")
}

# Speaks and exports with the least versions that the wheel allows, so that it promises no version that does not work.
least() {
    local environment=$ENVIRONMENTS/least list=$ENVIRONMENTS/least.txt graphs=$ENVIRONMENTS/graphs
    local python=$environment/bin/python model=$PWD/examples/demo_voice/model torch
    uv venv --python "$BIN/python" "$environment" || fail "$ENVIRONMENTS/uv.log"
    uv pip compile --resolution lowest-direct --no-annotate --python "$python" --output-file "$list" \
        --extra client --extra gateway --extra server --extra voice --extra export pyproject.toml || fail "$ENVIRONMENTS/uv.log"
    torch=$(grep '^torch==' "$list")
    if uv pip install --python "$python" --no-deps --extra-index-url "$TORCH_INDEX" "$torch+cpu"; then
        sed -i -E '/^(torch|triton|nvidia-.*)==/d' "$list"
    else
        echo "dist: NOTICE: $torch+cpu was not found; installing plain $torch, several gigabytes with CUDA libraries"
    fi
    uv pip install --python "$python" --requirements "$list" || fail "$ENVIRONMENTS/uv.log"
    uv pip install --python "$python" --no-deps "$wheel" || fail "$ENVIRONMENTS/uv.log"
    (cd / && "$python" - "$model" <<'PYTHON'
import sys

import numpy as np
import token2wav_client, token2wav_gateway.cli, token2wav_server.cli, token2wav_voice.cli  # noqa: F401
from token2wav import Token2Wav, Voice

model = Token2Wav.load(sys.argv[1])
bands, size = model.config.mel_bands, model.config.speaker_size
voice = Voice(np.zeros(0, np.int32), np.zeros((0, bands), np.float32), np.ones(size, np.float32))
audio = model.synthesize(np.arange(100, 160), voice)
assert audio.shape == (60 * model.config.samples_per_token,) and np.isfinite(audio).all() and audio.std() > 0
PYTHON
    )
    "$environment/bin/token2wav" export onnx --model "$model" --out "$graphs" # compares them with torch
    echo "dist: least versions: $(sed -nE 's/^([A-Za-z-]+==[0-9.]+).*/\1/p' "$list" | tr '\n' ' ')"
}

# Resolves the dependencies from wheels only: the packages of `make setup`, and those of users on aarch64 (Grace, DGX
# Spark). The extras rtx and tensorrt have no wheels there that this project has tried, so pyproject.toml limits them to
# x86_64. Two packages are built from source: a small one of TensorRT, and with Python 3.14 pocketsphinx.
wheels() {
    local version built
    for version in 3.10 3.11 3.12 3.13 3.14; do
        built=(--no-binary tensorrt-rtx-cu13)
        [[ $version != 3.14 ]] || built+=(--no-binary pocketsphinx)
        have_wheels x86_64 "$version" "${built[@]}" --constraint constraints.txt --extra client --extra server \
            --extra onnx --extra export --extra rtx --extra dev
        have_wheels aarch64 "$version" --extra client --extra gateway --extra server --extra voice --extra export --extra gpu
    done
}

have_wheels() {
    local platform=$1 version=$2 list=$ENVIRONMENTS/wheels.txt
    local resolve=(uv pip compile --only-binary :all: --python-platform "$platform-manylinux_2_35"
        --python-version "$version" --output-file "$list")
    sed -n 's/^WHEEL = "\(.*\)"/\1/p' server/token2wav_server/launcher/binaries.py >"$ENVIRONMENTS/triton.in"
    "${resolve[@]}" --no-deps "$ENVIRONMENTS/triton.in" || fail "$ENVIRONMENTS/uv.log"
    rm -f "$list"
    "${resolve[@]}" "${@:3}" pyproject.toml || fail "$ENVIRONMENTS/uv.log"
    echo "dist: $platform, Python $version: $(grep -c '==' "$list") packages, each with a wheel"
}

uv() { "$BIN/uv" --quiet "$@" >"$ENVIRONMENTS/uv.log" 2>&1; }

cleanup() {
    [[ -z "$server$hub" ]] || kill $server $hub 2>/dev/null || true
    wait
    [[ -n "${KEEP:-}" ]] || rm -rf "$ENVIRONMENTS"
}

fail() {
    tail -n 20 "$1" >&2
    exit 1
}

main
