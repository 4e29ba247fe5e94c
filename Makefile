# Everything runs in .venv, which `make` sets up by itself. PYTHON chooses the interpreter (3.10 or newer).
PYTHON ?= python3
BIN := .venv/bin
SOURCES := trainer callbacks strategies examples benchmarks tests
export OMP_NUM_THREADS ?= 1
# Tests at a time: most of them wait for processes to start.
TESTS_AT_ONCE ?= 2

.PHONY: demo test test-slow check format bench test-gpu docs clean

demo: .venv/installed  ## train handwritten digits on two CPU ranks
	$(BIN)/python examples/digits.py trainer.accelerator=cpu trainer.devices=2

test: .venv/installed  ## the whole suite, without a GPU
	$(BIN)/pytest --numprocesses $(TESTS_AT_ONCE) --dist loadfile

check: .venv/installed  ## format, lint, types
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/basedpyright
	$(BIN)/shellcheck .ci/run examples/launch/*.sh examples/launch/*.sbatch

format: .venv/installed
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

bench: .venv/installed  ## what a step costs beside the raw loop
	$(BIN)/python benchmarks/compare.py --impls raw,samestep --ranks 1 --mode bare
	$(BIN)/python benchmarks/compare.py --impls raw,samestep --ranks 1 --mode typical
	$(BIN)/python benchmarks/compare.py --impls raw,samestep --ranks 2 --mode bare
	$(BIN)/python benchmarks/import_time.py

test-slow: .venv/installed  ## the suite's slow part: many kills and restarts, launch scripts, whole programs
	$(BIN)/pytest -m slow

test-gpu: .venv/installed  ## what needs CUDA
	$(BIN)/pytest -m gpu

docs: .venv/installed  ## the documentation as pages, in site/
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/zensical build

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis runs site

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; set PYTHON=…"; exit 1; }
	@echo "Setting up .venv (PyTorch is a large download) …"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
