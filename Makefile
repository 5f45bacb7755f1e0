# `make demo` runs the main job, `make test` the tests; both set up a virtual environment first.
# `make test-all` adds the slow tests: ahead-of-time compilation for every target, long prompts.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(max(1, min(os.cpu_count() or 1, 8)))')

.PHONY: demo test test-all lint clean

demo: $(VENV)/demo.stamp
	$(BIN)/python -m tinfer.generate --prompt "中国的首都是哪里？" --temperature 0 --report-kernels

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow"

test-all: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[chat]"
	touch $@

$(VENV)/test.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test,chat,triton]"
	touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test,chat,triton,dev]"
	touch $@

clean:
	rm -rf $(VENV)
