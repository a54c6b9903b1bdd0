# Image of the server, with two targets: `gpu` is based on NVIDIA's Triton image, `cpu` on plain Python with Triton from a
# wheel.
#
#     docker build --file docker/server.Dockerfile --target gpu --tag token2wav-server:0.1.0 .
#
# All packages are installed in the image. A container downloads nothing, and writes only to /tmp, /run/token2wav, /dev/shm
# and, when it builds engines, /engines.

# Triton 2.71, which fixes all advisories of docs/security.md; CUDA 13.3, Python 3.12.
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:26.07-py3
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm
# Extras of the server. Append `,gateway` for clients of CosyVoice's recipe (docs/recipe.md).
ARG EXTRAS=client,server,export

FROM ${PYTHON_IMAGE} AS project
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
COPY constraints.txt ./
RUN python3 -m pip install --constraint constraints.txt setuptools wheel ziglang
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY token2wav ./token2wav
COPY client ./client
COPY exporters ./exporters
COPY gateway ./gateway
COPY voices ./voices
COPY server ./server
COPY model_repository ./model_repository
# The native front, for the architecture of the image. The package ziglang has the compiler.
RUN python3 server/token2wav_server/front/build.py "$(uname -m)"
RUN python3 -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

FROM project AS gpu-wheels
ARG EXTRAS
# rtx: TensorRT-RTX; tensorrt: the TensorRT of NVIDIA's image, for data centre GPUs; none. docs/export.md explains the
# choice.
ARG TENSORRT=rtx
# Version of CUDA of torch: 13, or 12 for older drivers (docs/deployment.md).
ARG CUDA=13
ARG CUDA_12_TORCH_INDEX=https://download.pytorch.org/whl/cu126
RUN case "$CUDA-$TENSORRT" in \
        13-rtx) package=tensorrt-rtx-cu13 ;; \
        13-tensorrt) package=tensorrt-cu13-bindings ;; \
        13-none | 12-none) package= ;; \
        12-*) echo "CUDA=12 needs TENSORRT=none" >&2; exit 1 ;; \
        *) echo "CUDA=$CUDA is not 12 or 13, or TENSORRT=$TENSORRT is not one of rtx, tensorrt, none" >&2; exit 1 ;; \
    esac \
    && wheel=$(echo /wheels/token2wav-*.whl) \
    && echo "$package" > /wheels/tensorrt.txt \
    && if [ "$CUDA" = 12 ]; then \
        # The pinned libraries of CUDA are those of version 13. torch names its own.
        sed -i -E '/^(cuda|nvidia)-/{/^nvidia-pytriton/!d}' constraints.txt \
        && python3 -m pip wheel --no-deps --wheel-dir /wheels --extra-index-url "$CUDA_12_TORCH_INDEX" \
            "torch==2.13.0+cu126"; \
    fi \
    && python3 -m pip wheel --constraint constraints.txt --wheel-dir /wheels --find-links /wheels \
        "${wheel}[$EXTRAS]" $package

FROM project AS cpu-wheels
ARG EXTRAS
ARG CPU_TORCH_INDEX=https://download.pytorch.org/whl/cpu
# torch without its dependencies, which are dependencies of the project: the other index is used only for torch.
RUN python3 -m pip wheel --no-deps --wheel-dir /wheels --extra-index-url "$CPU_TORCH_INDEX" "torch==2.13.0+cpu" \
    && python3 -m pip wheel --no-deps --constraint constraints.txt --wheel-dir /wheels nvidia-pytriton \
    && wheel=$(echo /wheels/token2wav-*.whl) \
    && python3 -m pip wheel --constraint constraints.txt --wheel-dir /wheels --find-links /wheels \
        "${wheel}[$EXTRAS]"

FROM ${TRITON_IMAGE} AS gpu
ARG EXTRAS
# A virtual environment of the Python for which NVIDIA's Python backend is made. The image need not have ensurepip.
RUN --mount=type=bind,from=gpu-wheels,source=/wheels,target=/wheels \
    python3 -m venv --without-pip /opt/token2wav/venv \
    && wheel=$(echo /wheels/token2wav-*.whl) \
    && python3 -m pip --python /opt/token2wav/venv/bin/python install --no-cache-dir --no-index --find-links /wheels \
        "${wheel}[$EXTRAS]" --requirement /wheels/tensorrt.txt \
    && if [ "$(cat /wheels/tensorrt.txt)" = tensorrt-cu13-bindings ]; then \
        case "${TRT_VERSION:+$(echo /wheels/tensorrt_cu13_bindings-*)}" in \
            '' | */tensorrt_cu13_bindings-"${TRT_VERSION%%+*}"[.-]*) ;; \
            *) echo "this image has TensorRT $TRT_VERSION, not that of constraints.txt:" \
                "set TRITON_IMAGE or tensorrt-cu13-bindings (docs/deployment.md)" >&2; exit 1 ;; \
        esac; \
        # The bindings lack the module `tensorrt`, whose package would install the libraries a second time.
        printf 'from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n' \
            > "$(echo /opt/token2wav/venv/lib/python3*/site-packages)/tensorrt.py"; \
    fi \
    # Remove tests, headers and programs of the packages, which the server does not use.
    && site=$(echo /opt/token2wav/venv/lib/python3*/site-packages) \
    && rm -rf "$site"/torch/test "$site"/torch/include "$site"/torch/bin/*[Tt]est* "$site"/torch/bin/protoc* \
        "$site"/onnx/backend/test
# hadolint ignore=DL3064
ENV TOKEN2WAV_TRITONSERVER=/opt/tritonserver \
    PATH=/opt/token2wav/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp
# The Triton language compiles the libraries that launch its kernels when the server starts. NVIDIA's image
# has the required clang and Python headers; the build fails here for an image without them. (torch for the CPU does not
# include the language.)
RUN if [ -d "$(echo /opt/token2wav/venv/lib/python3*/site-packages/triton)" ] \
    && ! TRITON_CACHE_DIR=/tmp/probe python3 -c "from triton.runtime.build import compile_module_from_src as compile; \
        compile('#include <Python.h>\nstatic struct PyModuleDef module = {PyModuleDef_HEAD_INIT, \"probe\"};\n' \
        'PyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&module); }', 'probe')"; then \
        echo "this image cannot compile for the Triton language: it needs clang or gcc, and Python.h" >&2; exit 1; \
    fi \
    && rm -rf /tmp/probe
COPY docker/entrypoint.sh docker/engines.py docker/server.yaml /opt/token2wav/docker/
# A new volume has the owner of the folder on which it is mounted.
RUN install --directory --owner=10001 --group=10001 /engines /models /run/token2wav
# If a package is missing, the build fails here and not in a container.
RUN for command in serve health export; do token2wav $command --help > /dev/null || exit 1; done
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
ENTRYPOINT ["/opt/token2wav/docker/entrypoint.sh"]
CMD ["serve"]

FROM ${PYTHON_IMAGE} AS cpu
ARG EXTRAS
RUN --mount=type=bind,from=cpu-wheels,source=/wheels,target=/wheels \
    python3 -m venv --without-pip /opt/token2wav/venv \
    && wheel=$(echo /wheels/token2wav-*.whl) \
    && python3 -m pip --python /opt/token2wav/venv/bin/python install --no-cache-dir --no-index --find-links /wheels \
        "${wheel}[$EXTRAS]" \
    && PATH=/opt/token2wav/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels token2wav setup \
    # Remove tests, headers and programs of the packages, which the server does not use.
    && site=$(echo /opt/token2wav/venv/lib/python3*/site-packages) \
    && rm -rf "$site"/torch/test "$site"/torch/include "$site"/torch/bin/*[Tt]est* "$site"/torch/bin/protoc* \
        "$site"/onnx/backend/test
ENV PATH=/opt/token2wav/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp
COPY docker/entrypoint.sh docker/engines.py docker/server.yaml /opt/token2wav/docker/
RUN install --directory --owner=10001 --group=10001 /engines /models /run/token2wav
# If a package is missing, the build fails here and not in a container.
RUN for command in serve health export; do token2wav $command --help > /dev/null || exit 1; done
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
ENTRYPOINT ["/opt/token2wav/docker/entrypoint.sh"]
CMD ["serve"]
