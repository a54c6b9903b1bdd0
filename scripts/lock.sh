#!/usr/bin/env bash
# Writes constraints.txt: one version of each package that the extras need, for Python 3.10 to 3.14. `make setup` and the
# images install these versions. Run this script to update the packages, then run `make test`. It needs PyPI, and
# pypi.nvidia.com for the extra `tensorrt`.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
# Packages that no extra requires: torch as scripts/setup.sh installs it, the build tools of wheels, the wheel with
# tritonserver, and the Python bindings for the TensorRT version of NVIDIA's image 26.07-trtllm-python-py3. NumPy is
# older than 2.5, because mypy checks the project for Python 3.10, and cannot read the types of NumPy 2.5 for it.
cat >"$pins" <<'PINS'
numpy<2.5
nvidia-pytriton==0.7.0
setuptools==84.2.1
tensorrt-cu13-bindings==10.14.1.48.post1
torch==2.13.0
wheel==0.48.0
PINS

locked=$(.venv/bin/uv pip compile --quiet --all-extras --universal --python-version 3.10 --constraint "$pins" \
    --no-header --no-annotate "$@" pyproject.toml)
{
    echo "# Made by scripts/lock.sh. Versions of everything that is installed, for each Python, to the patch level."
    { echo "$locked"; grep -Ev '^(numpy|torch)' "$pins"; } | sort --unique
} >constraints.txt
