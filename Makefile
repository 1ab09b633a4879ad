# Two commands for a fresh machine: `make demo` and `make test`. Both set up .venv first.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# Processes of the test-suite.
WORKERS ?= 2
# One thread a process: at these sizes more threads bring nothing, and contention costs 4 to 20 times.
export OMP_NUM_THREADS ?= 1
export MALLOC_MMAP_THRESHOLD_ ?= 1073741824
export MALLOC_TRIM_THRESHOLD_ ?= 2147483648
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test check slow ecosystem bench clean help

help:
	@echo "make demo    train a small agent on a rollout tree (CPU, about 10 minutes)"
	@echo "make test    run the test-suite"
	@echo "make check   ruff, pyright, layer rules, file and function sizes"
	@echo "make slow    the long studies that 'make test' leaves out"
	@echo "make ecosystem  tests against the real OpenEnv and verifiers, each in a virtual environment of its own"
	@echo "make bench   all benchmarks (writes benchmarks/baselines/*.json)"

$(VENV)/.ready: pyproject.toml constraints.txt scripts/setup.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/setup.sh
	@touch $@

demo: $(VENV)/.ready
	$(BIN)/branchpoint train examples/demo.yaml --fresh

test: $(VENV)/.ready check
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m slow

ecosystem:
	PYTHON="$(PYTHON)" bash scripts/ecosystem.sh

check: $(VENV)/.ready
	$(BIN)/ruff check src tests benchmarks scripts
	$(BIN)/ruff format --check src tests benchmarks scripts
	$(BIN)/pyright --pythonpath $(BIN)/python src
	$(BIN)/python -m pytest tests/test_house.py

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist
