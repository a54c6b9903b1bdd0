#!/usr/bin/env bash
# Checks the GPU path with the packages of the GPU machine of docs/gpu.md, in .venv-gpu. Needs no GPU.
# PYTHON=... selects the interpreter. The default is Python 3.12, or else the newest of 3.10 and 3.11.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly ENVIRONMENT=.venv-gpu
readonly STAMP=$ENVIRONMENT/setup-stamp
readonly LOG=$ENVIRONMENT/setup.log
readonly OUT=out/gpu-stack
# numpy 2.5 needs Python 3.12. An older Python gets the newest release that it can use.
readonly PACKAGES=(
    torch==2.11.0 triton==3.6.0 'numpy==2.5.2; python_version >= "3.12"' 'numpy>=2,<3' pyyaml safetensors scipy matplotlib
    pytest onnx onnxruntime cuda-bindings tqdm
)

main() {
    local python wanted
    python=$(chosen_python)
    wanted="$("$python" --version) ${PACKAGES[*]}"
    if [[ "$(cat "$STAMP" 2>/dev/null)" != "$wanted" ]]; then
        say "making $ENVIRONMENT with $("$python" --version), torch 2.11 and CUDA libraries (5 GB)"
        "$python" -m venv --clear "$ENVIRONMENT"
        "$ENVIRONMENT/bin/python" -m pip --disable-pip-version-check install --no-compile "${PACKAGES[@]}" >"$LOG" 2>&1 ||
            { tail -n 20 "$LOG" >&2; exit 1; }
        echo "$wanted" >"$STAMP"
    fi
    rm -rf "$OUT"
    export PYTHONPATH=.:client:exporters:server TRITON_CACHE_DIR="$PWD/$OUT/triton-cache"
    say "rehearsal of slice 1"
    run -m benchmarks.gpu_check --rehearse --slice 1 --out "$OUT"
    say "collection of all tests for a GPU"
    tests --collect-only -m gpu $(files_of_tests)
    say "kernels of the tests, compiled for compute capability 9.0"
    TRITON_INTERPRET=0 tests -p testkit.compile_only tests/kernels
    say "kernels of all models, compiled for compute capabilities 8.0, 9.0 and 10.0"
    tests --noconftest -m "slow or not slow" lab/tests/test_compiling.py
    say "failed captures, emulated"
    tests -m "not gpu" tests/execution/test_cuda_graphs.py
}

chosen_python() {
    local candidate
    for candidate in ${PYTHON:-python3.12 python3.11 python3.10}; do
        if "$candidate" --version >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "gpu-stack: no Python 3.10 to 3.12 found; name one with PYTHON=..." >&2
    exit 1
}

files_of_tests() { run -c "from benchmarks.gpu.pytest_rows import files_of_tests; print(*files_of_tests())"; }
# tests/conftest.py needs further packages.
tests() { run -m pytest -q -p no:cacheprovider --confcutdir=tests/execution "$@"; }
run() { "$ENVIRONMENT/bin/python" -B "$@"; }
say() { echo "gpu-stack: $*"; }

main
