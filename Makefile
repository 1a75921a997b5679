# make train | make test: both set up .venv from a lock first, and need nothing but Python >= 3.11.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
# What `make lock` does not take the newest of: torch is what the project is tested with.
HOLD ?= torch==2.13.0
INDEX ?= https://pypi.org/simple
# Three processes take the tests file by file, on two cores too, as many tests wait. ARGS="-n0" runs all in one.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
# Hundreds of processes import the library: each would compile it where the environment forbids to keep bytecode.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help train test test-full virtual-gpu docs-check site lint types imports check check-locks check-wheel lock clean

help:
	@echo "make train      set up and train the default model on this machine (ARGS=\"zero.stage=3\" to change it)"
	@echo "make test       set up and run the tests, in three processes (ARGS=\"-n0\" for one)"
	@echo "make test-full  the tests, with every combination"
	@echo "make virtual-gpu  the tests of a GPU, on a virtual one (VIRTUAL_ORDER=side-first for another order of streams)"
	@echo "make check      lint, types, import rules"
	@echo "make docs-check every block of code of the pages runs, or is read as it would be"
	@echo "make site       the docs as a site, in site/"
	@echo "make check-locks  the locks resolve on each platform and Python, from the public index alone"
	@echo "make check-wheel      the wheel builds, installs in an empty environment, and trains there"
	@echo "make lock       resolve both locks anew from the public index"

train: $(READY)
	@$(BIN)/shardwise train $(ARGS)

test: $(READY_DEV)
	$(PYTEST) $(ARGS)

test-full: $(READY_DEV)
	$(PYTEST) --full $(ARGS)

# Needs a C++ compiler and torch's CPU build.
virtual-gpu: $(READY_DEV)
	PYTHONPATH=tests:src $(BIN)/python -m pytest -n0 -p device.plugin -rs tests/gpu $(ARGS)

docs-check: $(READY_DEV)
	$(BIN)/python -m pytest -n0 tests/unit/test_docs.py tests/unit/attention/test_attention_docs.py $(ARGS)

# The site reads the sources, and imports the config's alone, so its environment has no torch.
site:
	@$(PYTHON) -m venv .venv-site
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > .venv-site/requirements.txt
	@.venv-site/bin/pip install --quiet --disable-pip-version-check -r .venv-site/requirements.txt
	.venv-site/bin/python -m mkdocs build --strict

check: lint types imports

lint: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY_DEV)
	$(BIN)/mypy

imports: $(READY_DEV)
	$(BIN)/lint-imports

check-locks: $(READY_DEV)
	$(BIN)/python .ci/locks.py --uv $(BIN)/uv --index $(INDEX) check

check-wheel: $(READY_DEV)
	bash .ci/wheel $(BIN)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Shardwise needs Python >= 3.11; set PYTHON=python3.11 or newer")'
	@echo "setting up $(VENV) from requirements.lock (once, a minute or two)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -r requirements.lock
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(READY_DEV): requirements-dev.lock $(READY)
	@echo "adding what development needs, from requirements-dev.lock"
	@$(PIP) -r requirements-dev.lock
	@touch $@

# uv comes from an environment of its own: the locks may be what is wrong.
lock:
	rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock && .venv-lock/bin/pip install --quiet uv
	.venv-lock/bin/python .ci/locks.py --uv .venv-lock/bin/uv --index $(INDEX) write $(addprefix --hold ,$(HOLD))
	rm -rf .venv-lock

clean:
	rm -rf $(VENV) .venv-lock .venv-site site .pytest_cache .mypy_cache .ruff_cache .hypothesis
