# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
RUNS ?= runs/voc-laptop

.PHONY: demo test lint setup clean results results-shapes

demo: setup
	$(BIN)/incseg train --data shapes --out runs/demo
	$(BIN)/incseg data export --data shapes --split val --limit 6 --out runs/demo/images
	$(BIN)/incseg predict runs/demo runs/demo/images/images --out runs/demo/predictions
	$(BIN)/incseg report runs/demo
	@echo "Open runs/demo/report/index.html: tables, curves, pictures, uncertainty. To play with the model: $(BIN)/incseg demo runs/demo --open"

test: lint
	$(BIN)/python -m pytest -n 2

lint: setup
	$(BIN)/ruff check src tests scripts
	$(BIN)/ruff format --check src tests scripts
	$(BIN)/mypy

# pages of results/ from the run folders under RUNS; trains nothing
results: setup
	$(BIN)/python scripts/results.py $(RUNS)

results-shapes: setup
	$(BIN)/python scripts/compare_shapes.py
	$(BIN)/python scripts/loss_memory.py

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,imagenet,tensorboard,onnx]'
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
