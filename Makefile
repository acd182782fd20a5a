# Every target sets up what it needs. Extra pip flags: make install PIP_FLAGS="--index-url ..."
PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test lint bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt $(PIP_FLAGS)
	$(BIN)/python -m pip install --quiet -c constraints.txt $(PIP_FLAGS) -e ".[test,lint]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/warmroute demo

test: $(STAMP)
	$(BIN)/warmroute models pull smollm2-135m
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/warmroute models pull smollm2-135m
	$(BIN)/warmroute bench route
	$(BIN)/warmroute bench engine

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
