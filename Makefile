# `make demo` and `make test` set up .venv on first use; everything else is optional.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
# Processes that run tests side by side, each a whole file at a time; 0 for none beside pytest itself.
TEST_WORKERS ?= 2

.PHONY: demo test check format setup clean

demo: setup
	$(BIN)/rankfold demo $(DEMO_ARGS)

test: setup
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: $(VENV)/.ready

# uv does the installing because it is several times faster than pip; it is told of pip's own find-links, so
# that a wheel which the machine's owner laid out for pip is taken here too.
$(VENV)/.ready: pyproject.toml constraints.txt setup.py $(wildcard telemetry/summary/kernel/*)
	$(PYTHON) -c 'import sys; sys.exit("Rankfold needs Python 3.10 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	UV_FIND_LINKS="$$($(BIN)/python -m pip config get global.find-links 2>/dev/null | tr '\n' ',')" \
	    $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
