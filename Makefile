SHELL := bash
BIN := .venv/bin
# Returns at once, without output, if .venv is up to date. PYTHON=python3.12 selects the interpreter.
SETUP := @PYTHON="$(PYTHON)" scripts/setup.sh
# Python writes its bytecode cache even if the environment disables it. Otherwise every process that imports torch, such
# as each server of a test, compiles all imported modules again.
export PYTHONDONTWRITEBYTECODE :=

# Not ?=, because some shells export HOST.
HOST = 127.0.0.1
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002

.DEFAULT_GOAL := help
.PHONY: help setup demo speech test check faults lab-test release-test gpu-stack integrations lint format serve export gpu-check tensorrt-check demo-voice soak rehearsal images images-check docs docs-check dist clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## create .venv with all dependencies (most other targets do this first)
	$(SETUP)

demo: ## [WAV=file] [FAMILY=codec]: synthesize a sentence, or a recording, with a real Triton server into out/demo.wav or out/demo_codec.wav
	$(SETUP)
	@$(BIN)/python -m examples.demo $(if $(WAV),"$(WAV)") $(if $(FAMILY),--family "$(FAMILY)")

speech: ## [ARGS=]: serve OpenAI's speech interface with the demo voice and a language model, until Ctrl-C
	$(SETUP)
	@$(BIN)/token2wav up --voices out/voices $(ARGS)

test: lint ## lint, then run all tests in five processes (many tests wait for servers)
	$(BIN)/pytest -n 5

check: lint ## lint, then run the tests that need no server and no export (two minutes)
	$(BIN)/pytest -n 2 --ignore tests/client/with_server $(addprefix tests/,test_*.py config cache layers networks serving families/streamflow client voices server/test_*.py server/ensemble docs)

faults: ## [ARGS=]: put faults into the code, one at a time, and run the tests that find them (half an hour)
	$(SETUP)
	@$(BIN)/python -m tests.faults $(ARGS)

lab-test: lint ## run the tests of lab/: simulations, launch counters, quality of the demo voice, its recipe (5 minutes)
	$(BIN)/pytest -n 2 -m "not slow" lab/tests

release-test: lint gpu-stack ## run the tests that are too slow for `make test`: kernels compiled for GPUs, most exports, soaks, the server with the Python front (40 minutes)
	$(BIN)/pytest -n 2 -m slow
	$(BIN)/pytest -n 2 -m slow lab/tests
	TEST_FRONT=python $(BIN)/pytest -n 2 tests/served

gpu-stack: ## rehearse, collect, compile and emulate the GPU path with the packages of a GPU machine (10 minutes, 5 GB; no GPU)
	@scripts/gpu_stack.sh

integrations: ## [ARGS=openai realtime riva ...]: speak with libraries of other projects, and check what is heard
	$(SETUP)
	@$(BIN)/python -m lab.integrations $(ARGS)

lint: ## run ruff, and mypy if Python is 3.11 or later
	$(SETUP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@# The last NumPy for Python 3.10 declares other types than NumPy 2.4.
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "lint: mypy is left out, because it needs the NumPy of Python 3.11 or later"; exit 0; }; $(BIN)/mypy

format: ## format the code and sort imports
	$(SETUP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

serve: ## MODEL=folder [CONFIG= HOST= HTTP_PORT= GRPC_PORT= METRICS_PORT= ARGS=]: serve a model folder until Ctrl-C
	@test -n "$(MODEL)" || { echo "make serve: MODEL is missing; run: make serve MODEL=path/to/folder" >&2; exit 1; }
	$(SETUP)
	@$(BIN)/token2wav serve "$(MODEL)" $(if $(CONFIG),--config "$(CONFIG)") --host "$(HOST)" \
		--http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT) $(ARGS)

export: ## MODEL=folder [OUT=]: export the ONNX graphs of a model into FOLDER/engines, or into OUT
	@test -n "$(MODEL)" || { echo "make export: MODEL is missing; run: make export MODEL=path/to/folder" >&2; exit 1; }
	$(SETUP)
	@$(BIN)/token2wav export onnx --model "$(MODEL)" $(if $(OUT),--out "$(OUT)")

gpu-check: ## [ARGS=]: run every check that needs an NVIDIA GPU (27 minutes), with results in benchmarks/results/gpu
	$(SETUP)
	@$(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())" \
		|| { echo "make gpu-check: torch finds no CUDA device; run it on a machine with an NVIDIA GPU" >&2; exit 1; }
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

# The environment sees the packages of the container, such as tensorrt.
tensorrt-check: ## [ARGS=--rehearse]: in a container of NVIDIA with TensorRT, make engines, verify, capture and time them, with a report in out/tensorrt
	@test -d .venv-tensorrt || python3 -m venv --system-site-packages .venv-tensorrt
	@.venv-tensorrt/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[export]"
	.venv-tensorrt/bin/python -m benchmarks.gpu_check --section engines --minutes 30 --out out/tensorrt $(ARGS)

demo-voice: ## DATA=folder: export the newest checkpoints of the recipe as the demo voice, and measure its quality
	@test -n "$(DATA)" || { echo "make demo-voice: DATA is missing; run: make demo-voice DATA=demo_data" >&2; exit 1; }
	$(SETUP)
	@$(BIN)/python -m lab.demo_voice.export --data "$(DATA)"
	@$(BIN)/python -m lab.quality.quality
	@$(BIN)/python -m examples.demo
	@cp out/demo.png docs/demo.png

soak: ## [MINUTES=] [CODEC=name] [SEED=]: run a server (10 minutes) and a gateway (20) with misbehaving clients and killed processes, with results in benchmarks/results
	$(SETUP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.soak.run server $(if $(MINUTES),--minutes $(MINUTES)) $(if $(CODEC),--model $(CODEC)) $(if $(SEED),--seed $(SEED))
	$(if $(CODEC),,@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.soak.run gateway $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)))

rehearsal: ## drain, add, kill and disconnect servers behind the balancer (as root), with results in benchmarks/results/replicas.json
	$(SETUP)
	@$(BIN)/python -m lab.rehearsal

images: ## [ARGS=]: build the images of server and client with docker, podman or buildah
	@scripts/images.sh $(ARGS)

images-check: ## build the images on stand-ins for their base images, run and measure them (as root; 15 minutes, 10 GB)
	$(SETUP)
	@$(BIN)/python -m scripts.check_images

docs: ## build the documentation site into out/site
	$(SETUP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "docs: out/site/index.html"

docs-check: ## [PAGES=]: run the commands of README and docs that are marked as runnable (minutes; ports 8000 to 8002)
	$(SETUP)
	@$(BIN)/python scripts/run_docs.py $(PAGES)

dist: ## build wheel and sdist into dist/, and test every extra of the wheel in its own environment (minutes)
	$(SETUP)
	@scripts/dist.sh

clean: ## remove all generated files: .venv, out/, caches
	rm -rf .venv .venv-tensorrt out build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis ./*.egg-info \
		server/token2wav_server/front/native/*/
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
