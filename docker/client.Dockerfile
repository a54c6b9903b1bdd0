# Images of the client and of the gateway, without torch.
#
#     docker build --file docker/client.Dockerfile --target client --tag token2wav-client:0.1.0 .
#     docker build --file docker/client.Dockerfile --target gateway --tag token2wav-gateway:0.1.0 .

ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm
# Extras of the gateway. Append `,align` for times of words, and `,normalise` for numbers as words.
ARG EXTRAS=riva

FROM ${PYTHON_IMAGE} AS wheels
ARG EXTRAS
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
COPY constraints.txt ./
RUN python3 -m pip install --constraint constraints.txt setuptools wheel
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY token2wav ./token2wav
COPY client ./client
COPY exporters ./exporters
COPY gateway ./gateway
COPY voices ./voices
COPY server ./server
RUN python3 -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && wheel=$(echo /wheels/token2wav-*.whl) \
    && python3 -m pip wheel --constraint constraints.txt --wheel-dir /wheels "${wheel}[client,$EXTRAS]"

FROM ${PYTHON_IMAGE} AS gateway
ARG EXTRAS
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    python3 -m venv --without-pip /opt/token2wav/venv \
    && wheel=$(echo /wheels/token2wav-*.whl) \
    && python3 -m pip --python /opt/token2wav/venv/bin/python install --no-cache-dir --no-index --find-links /wheels \
        "${wheel}[$EXTRAS]" \
    && ! /opt/token2wav/venv/bin/python -c "import torch" 2>/dev/null
ENV PATH=/opt/token2wav/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1
# The folder of the voices is a volume that the gateway writes to.
RUN token2wav gateway --help > /dev/null && install --directory --owner=10001 --group=10001 /voices
WORKDIR /tmp
USER 10001:10001
EXPOSE 8080 8003 50051
ENTRYPOINT ["token2wav", "gateway"]
CMD ["--help"]

FROM ${PYTHON_IMAGE} AS client
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    python3 -m venv --without-pip /opt/token2wav/venv \
    && wheel=$(echo /wheels/token2wav-*.whl) \
    && python3 -m pip --python /opt/token2wav/venv/bin/python install --no-cache-dir --no-index --find-links /wheels \
        "${wheel}[client]" \
    && ! /opt/token2wav/venv/bin/python -c "import torch" 2>/dev/null
ENV PATH=/opt/token2wav/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1
RUN token2wav synth --help > /dev/null
WORKDIR /files
USER 10001:10001
ENTRYPOINT ["token2wav"]
CMD ["--help"]
