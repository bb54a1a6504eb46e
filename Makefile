# Everything runs in .venv; `make help` lists the targets. Choose the interpreter with PYTHON=...
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=

# Tests may talk to this machine, never to the network.
NO_NETWORK := --disable-socket --allow-unix-socket --allow-hosts=127.0.0.1,::1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test integration integration-vllm lint format bench clean

help:  ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.stamp-demo  ## Fetch the default models and run examples/quickstart.py
	$(BIN)/python examples/quickstart.py $(ARGS)

test: $(VENV)/.stamp-test  ## Run the unit tests: no weights, no network
	$(BIN)/python -m pytest tests/unit_tests tests/conformance -m "not integration" $(NO_NETWORK) $(ARGS)

integration: $(VENV)/.stamp-integration  ## Run the tests on real models (fetched once)
	$(BIN)/python -m pytest tests/integration_tests tests/conformance -m integration $(ARGS)

integration-vllm: $(VENV)/.stamp-integration  ## Run the tests of servers on a vLLM of its own (CPU; 3.4 GB)
	$(BIN)/python scripts/with_vllm_server.py -- $(BIN)/python -m pytest \
		tests/conformance/test_openai.py tests/integration_tests/test_vllm.py -m integration $(ARGS)

lint: $(VENV)/.stamp-lint  ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.stamp-lint  ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# With DATA, decoders are compared on its first LIMIT problems; OUT is gone on with if it is there.
OUT      ?= bench-results
LIMIT    ?= 40
DECODERS ?= target,draft,speculative,specguard-greedy

bench: $(VENV)/.stamp-bench  ## Compare with a bare loop and measure memory; with DATA=gsm8k.jsonl accuracy too
	$(BIN)/python benchmarks/overhead.py $(ARGS)
	$(if $(DATA),$(BIN)/specguard bench --data "$(DATA)" --limit $(LIMIT) --out "$(OUT)" \
		--decoders $(DECODERS))

clean:  ## Remove the environment and the caches of the tools (models stay)
	rm -rf $(VENV) .venv-vllm .mypy_cache .pytest_cache .ruff_cache build dist

# One environment, one stamp per set of extras: a repeated call installs nothing.
$(VENV)/.stamp-demo:        EXTRAS := llama-cpp,hub
$(VENV)/.stamp-test:        EXTRAS := test
$(VENV)/.stamp-integration: EXTRAS := test,test-agents,test-server,hub,sentence,transformers
$(VENV)/.stamp-bench:       EXTRAS := bench,llama-cpp,hub,transformers,openai
$(VENV)/.stamp-lint:        EXTRAS := lint,test

$(VENV)/.stamp-demo $(VENV)/.stamp-test $(VENV)/.stamp-integration $(VENV)/.stamp-bench \
		$(VENV)/.stamp-lint: \
		$(VENV)/.stamp-venv pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	@touch $@

# The version that was tested: newer ones bring gigabytes of GPU libraries on some platforms.
$(VENV)/.stamp-integration $(VENV)/.stamp-bench: $(VENV)/.stamp-torch
$(VENV)/.stamp-torch: $(VENV)/.stamp-venv
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	@touch $@

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "specguard_chains needs Python 3.11 or newer; '$(PYTHON)' is" \
			"$$($(PYTHON) --version 2>/dev/null || echo missing)." \
			"Name another one: make PYTHON=python3.12 ..." >&2; \
		exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { \
		echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; \
		exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@
