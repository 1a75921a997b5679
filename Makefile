# make train | make test: both set up .venv from the lock first, and need nothing but Python >= 3.11.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Two processes take the tests file by file: many of them wait, and no two of a file meet. ARGS="-n0" runs all in one.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help train test test-full lint types imports check lock clean

help:
	@echo "make train      set up and train the default model on this machine (ARGS=\"zero.stage=3\" to change it)"
	@echo "make test       set up and run the tests, in two processes (ARGS=\"-n0\" for one)"
	@echo "make test-full  the tests, with every combination"
	@echo "make check      lint, types, import rules"

train: $(READY)
	@$(BIN)/shardwise train $(ARGS)

test: $(READY)
	$(PYTEST) $(ARGS)

test-full: $(READY)
	$(PYTEST) --full $(ARGS)

check: lint types imports

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Shardwise needs Python >= 3.11; set PYTHON=python3.11 or newer")'
	@echo "setting up $(VENV) from requirements.lock (once, a minute or two)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# Resolve the newest versions that pyproject.toml allows, with torch held where the project is tested.
lock:
	rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet torch==2.13.0 "setuptools>=77" && .venv-lock/bin/pip install --quiet --editable '.[dev]'
	(head -2 requirements.lock; .venv-lock/bin/pip freeze --all --exclude-editable | grep -v '^pip==' | sed 's/+cpu//') > requirements.lock.new
	mv requirements.lock.new requirements.lock && rm -rf .venv-lock

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
