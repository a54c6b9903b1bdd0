#!/usr/bin/env bash
# Creates .venv with the project and all dependencies, with Python 3.10 to 3.14. Does nothing if .venv is up to date.
# PYTHON=... selects the interpreter. The default is the interpreter of the existing .venv, else python3.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The same release as plain torch, without several gigabytes of CUDA libraries ("+cpu").
readonly CPU_TORCH="torch==2.13.0+cpu"
readonly CPU_TORCH_INDEX="https://download.pytorch.org/whl/cpu"
readonly PLAIN_TORCH="torch>=2.7,<3"
readonly STAMP=.venv/setup-stamp
readonly LOG=.venv/setup.log

main() {
    local python version done_by wanted
    python=$(chosen_python)
    version=$(supported_version "$python")
    done_by="$version $PWD" # a virtual environment does not survive a move
    # LC_ALL: the order of the files depends on it
    wanted="$done_by $(LC_ALL=C; cat pyproject.toml constraints.txt scripts/setup.sh server/token2wav_server/setup.py \
        server/token2wav_server/front/build.py server/token2wav_server/front/native/*.* | sha256sum | cut -d' ' -f1)"
    if [[ "$(cat "$STAMP" 2>/dev/null)" == "$wanted" ]]; then
        return
    fi
    say "setting up .venv, with the log in $PWD/$LOG"
    install_system_packages "$python" "$version"
    if [[ "$(cat "$STAMP" 2>/dev/null)" != "$done_by "* ]]; then
        say "making .venv with Python $version"
        "$python" -m venv --clear .venv
        echo "$done_by unfinished" >"$STAMP"
    fi
    : >"$LOG"
    install_torch
    say "installing the project and its tools (packages of 700 MB)"
    pip --constraint constraints.txt --editable ".[client,server,onnx,export,rtx,dev]" || fail_with_log
    say "installing tritonserver (150 MB)"
    local recipe=(--recipe)
    if [[ "$version" == 3.13 || "$version" == 3.14 ]]; then
        say "NOTICE: the models of CosyVoice's Triton recipe are left out, because they need Python 3.10 to 3.12"
        recipe=()
    fi
    logged .venv/bin/token2wav setup "${recipe[@]}" || fail_with_log
    echo "$wanted" >"$STAMP"
    say "done: .venv is ready"
}

chosen_python() {
    if [[ -n "${PYTHON:-}" ]]; then
        echo "$PYTHON"
    elif [[ -f "$STAMP" ]] && .venv/bin/python -c "" 2>/dev/null; then
        # Not .venv's own, in case it has to be made anew.
        .venv/bin/python -c "import sys; print(getattr(sys, '_base_executable', sys.executable))"
    else
        echo python3
    fi
}

supported_version() {
    local version
    command -v "$1" >/dev/null || fail "$1 not found: install Python 3.10 to 3.14, or name one with PYTHON=..."
    version=$("$1" -c "import sys; print('%d.%d' % sys.version_info[:2])") || fail "$1 does not run"
    case "$version" in
        3.10 | 3.11 | 3.12 | 3.13 | 3.14) echo "$version" ;;
        *) fail "$1 is Python $version, but 3.10 to 3.14 is needed: name one, as in PYTHON=python3.12 make setup" ;;
    esac
}

# Debian and Ubuntu keep venv and libpython, which Triton's Python backend loads, in packages of their own. That backend
# does not exist for Python 3.14, so the native front has to be compiled. PyPI has no wheel of pocketsphinx for 3.14, so
# pip compiles it.
install_system_packages() {
    local python=$1 version=$2 packages=() sudo=()
    "$python" -c "import ensurepip, venv" 2>/dev/null || packages+=("python$version-venv")
    if [[ "$version" == 3.14 ]]; then
        command -v g++ >/dev/null || packages+=(g++)
        has_headers "$python" || packages+=("python$version-dev")
    else
        has_libpython "$python" "$version" || packages+=("libpython$version")
    fi
    ((${#packages[@]})) || return 0
    local command="apt-get install -y --no-install-recommends ${packages[*]}"
    local remedy="missing on this system: ${packages[*]}; as root run: $command"
    command -v apt-get >/dev/null || fail "$remedy (or your system's equivalent)"
    if ((EUID != 0)); then
        sudo -n true 2>/dev/null || fail "$remedy"
        sudo=(sudo -n)
    fi
    say "installing system packages: ${packages[*]}"
    local apt=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq) output
    "${apt[@]}" update >/dev/null 2>&1 || true # old lists may do
    if ! output=$("${apt[@]}" install -y --no-install-recommends "${packages[@]}" 2>&1); then
        echo "$output" >&2
        fail "$remedy"
    fi
}

has_libpython() {
    "$1" - "libpython$2.so.1.0" <<'PYTHON' 2>/dev/null
import ctypes, os, sys, sysconfig

folders = [sysconfig.get_config_var("LIBDIR") or "", os.path.join(sys.base_prefix, "lib")]
if not any(os.path.isfile(os.path.join(folder, sys.argv[1])) for folder in folders):
    ctypes.CDLL(sys.argv[1])
PYTHON
}

has_headers() { [[ -f "$("$1" -c "import sysconfig; print(sysconfig.get_path('include'))")/Python.h" ]]; }

# Without its dependencies, which come with the project: only torch is to be looked for in the other index.
install_torch() {
    if nvidia-smi -L 2>/dev/null | grep '^GPU ' >/dev/null; then
        say "installing torch with CUDA, several gigabytes (this machine has an NVIDIA GPU)"
    else
        say "installing torch for the CPU, 200 MB (no NVIDIA GPU here)"
        # An index that does not respond is not an error, because pip may be configured to find the wheel elsewhere.
        if pip --no-deps --timeout 15 --retries 1 --extra-index-url "$CPU_TORCH_INDEX" "$CPU_TORCH"; then
            return
        fi
        say "NOTICE: $CPU_TORCH was not found; installing plain torch instead, several gigabytes with CUDA libraries"
    fi
    pip "$PLAIN_TORCH" || fail_with_log
}

# Bytecode is not compiled: it takes a minute, and most modules are never imported.
pip() { logged .venv/bin/python -m pip --disable-pip-version-check --no-input install --no-compile "$@"; }

# Runs a command with its output in the log. A terminal shows the latest line of the output.
logged() {
    local line columns=0
    [[ -t 1 ]] && columns=$(($(tput cols 2>/dev/null || echo 80) - 1))
    "$@" 2>&1 | while IFS= read -r line; do
        printf '%s\n' "$line" >>"$LOG"
        ((columns == 0)) || printf '\r\033[K%s' "${line:0:columns}"
    done
    local status=${PIPESTATUS[0]}
    ((columns == 0)) || printf '\r\033[K'
    return "$status"
}

say() { echo "setup: $*"; }
fail() {
    echo "setup: error: $*" >&2
    exit 1
}
fail_with_log() {
    tail -n 20 "$LOG" >&2
    fail "pip failed, see above or $PWD/$LOG"
}

main
