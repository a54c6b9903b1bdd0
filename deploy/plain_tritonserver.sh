#!/usr/bin/env bash
# Runs Triton from the wheel without the launcher; docs/deployment.md lists the missing functions. MODEL is a model folder
# and CONFIG a settings file. TOKEN2WAV_HOST is the address of gRPC (default: 127.0.0.1). The script creates the folder
# backends and the socket engine.sock in the working directory.

set -euo pipefail

wheel=$(python3 -c 'from token2wav_server.launcher.binaries import WHEEL_FOLDER; print(WHEEL_FOLDER)')
models=$(python3 -c 'from importlib.resources import files; print(files("token2wav_server") / "model_repository")')
triton=$wheel/pytriton/tritonserver
mkdir -p backends/python
ln -sf "$triton"/backends/python/*.so "$triton"/backends/python/*.py backends/python/
ln -sf "$triton/python_backend_stubs/$(python3 -c 'import sysconfig; print(sysconfig.get_python_version())')"/* \
    backends/python/
python_libraries=$(python3 -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))')
export LD_LIBRARY_PATH=$python_libraries:$wheel/nvidia_pytriton.libs
export TOKEN2WAV_MODEL=$MODEL TOKEN2WAV_CONFIG=$CONFIG TOKEN2WAV_ENGINE=$PWD/engine.sock
# The process with the model. It ends with this process, which becomes tritonserver.
LD_LIBRARY_PATH= python3 -m token2wav_server.engine --parent=$$ --metrics-port=8003 &
exec "$triton/bin/tritonserver" --model-repository="$models" --model-control-mode=explicit --load-model=token2wav \
    --backend-directory=backends \
    --disable-auto-complete-config --exit-timeout-secs=5 --allow-http=false \
    --grpc-address="${TOKEN2WAV_HOST:-127.0.0.1}" --grpc-port=8001 --metrics-address=127.0.0.1 --metrics-port=8002 \
    --grpc-restricted-protocol="model-repository,shared-memory,trace,logging:admin-key=$(openssl rand -hex 32)"
