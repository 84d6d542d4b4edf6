# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
BENCH := .venv-bench
LOWEST := .venv-lowest
RAY := .venv-ray
RUNS ?= runs/voc-laptop

.PHONY: demo test lint setup clean results results-shapes bench torture test-lowest test-ray

# Real photographs with the ready model, then a class that it does not know, added from one photograph.
demo: setup
	$(BIN)/incseg predict voc20 examples/cup/images --out runs/demo/before
	$(BIN)/incseg extend voc20 --root examples/cup --out runs/demo/cup
	$(BIN)/incseg predict runs/demo/cup examples/cup/images --out runs/demo/after
	$(BIN)/incseg report runs/demo/cup
	@echo "Look at runs/demo/before, runs/demo/after and runs/demo/cup/report/index.html. To try it on your own images: $(BIN)/incseg demo runs/demo/cup --open"

test: lint
	$(BIN)/python -m pytest -n 2

# The lowest declared version of every dependency, and tests of what depends on them: golden runs, files, messages.
# torch is not lowered: older wheels bring gigabytes of CUDA, and the exact golden numbers hold for one torch only.
# Old matplotlib calls what new pyparsing deprecates, which users never see and tests must not fail for.
FAST := golden cli files model_files inference export report completion doctor tensorboard packaging
test-lowest: $(LOWEST)/.installed
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n 2 -W ignore::DeprecationWarning \
	  -W ignore::PendingDeprecationWarning $(FAST:%=tests/test_%.py)

$(LOWEST)/.installed: pyproject.toml tools/lowest.py
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python tools/lowest.py > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(LOWEST)/lowest.txt \
	  -e '.[dev,imagenet,tensorboard,onnx]'
	touch $@

# Sweeps on a Ray cluster of two nodes on this machine. Ray is large, and the test takes a minute.
test-ray: $(RAY)/.installed
	OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest tests/test_sweep_ray.py

$(RAY)/.installed: pyproject.toml
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev,ray]'
	touch $@

lint: setup
	$(BIN)/ruff check src tests tools
	$(BIN)/ruff format --check src tests tools
	$(BIN)/mypy

# pages of results/ and tables of the docs from the run folders under RUNS and from the summaries of others (results/NAME/runs.jsonl); trains nothing
results: setup
	$(BIN)/python tools/results.py $(RUNS)
	$(BIN)/python tools/doc_tables.py

results-shapes: setup
	$(BIN)/python tools/compare_shapes.py

# speed and memory against their aims, on a quiet machine; what it compares with stays in an environment of its own
bench: $(BENCH)/.installed
	$(BENCH)/bin/python -m tools.bench

$(BENCH)/.installed: pyproject.toml
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[bench,imagenet]'
	touch $@

# every fault that we know how to cause, counted in results/torture.md; a short form of it is among the tests
torture: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.torture

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,imagenet,tensorboard,onnx]'
	touch $(READY)

clean:
	rm -rf $(VENV) $(BENCH) $(LOWEST) $(RAY) .pytest_cache .mypy_cache .ruff_cache .hypothesis
