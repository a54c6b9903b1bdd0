#!/usr/bin/env bash
# Runs Triton without the launcher; docs/deployment.md lists the missing functions. MODEL is a model folder and CONFIG a
# settings file. TOKEN2WAV_HOST is the address of gRPC (default: 127.0.0.1). The script creates the folder backends and
# the socket engine.sock in the working directory.

set -euo pipefail

models=$(python3 -c 'from importlib.resources import files; print(files("token2wav_server") / "model_repository")')
rm -rf backends
triton=$(python3 -c '
from pathlib import Path
from token2wav_server.launcher.binaries import find_tritonserver
triton = find_tritonserver(Path("."))
print(triton.executable, triton.backends, triton.environment.get("LD_LIBRARY_PATH", ""), sep="\n")')
{ read -r tritonserver; read -r backends; read -r libraries || true; } <<<"$triton"
export LD_LIBRARY_PATH=$libraries
export TOKEN2WAV_MODEL=$MODEL TOKEN2WAV_CONFIG=$CONFIG TOKEN2WAV_ENGINE=$PWD/engine.sock
# The process with the model. It ends with this process, which becomes tritonserver.
LD_LIBRARY_PATH= python3 -m token2wav_server.engine --parent=$$ --metrics-port=8003 &
exec "$tritonserver" --model-repository="$models" --model-control-mode=explicit --load-model=token2wav \
    --backend-directory="$backends" \
    --disable-auto-complete-config --exit-timeout-secs=5 --allow-http=false \
    --grpc-address="${TOKEN2WAV_HOST:-127.0.0.1}" --grpc-port=8001 --metrics-address=127.0.0.1 --metrics-port=8002 \
    --grpc-restricted-protocol="model-repository,shared-memory,trace,logging:admin-key=$(openssl rand -hex 32)"
