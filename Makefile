# Everything happens in $(VENV), which is made when it is not there.
#
#   make demo    install, run the demo, leave demo.ipynb
#   make test    the tests
#   make test-vllm   those against a real vLLM server: minutes; skipped where it is not to be had
#
# PYTHON=python3.12 chooses another interpreter for a new $(VENV).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-vllm lint bench clean

demo: $(VENV)/.demo
	@$(BIN)/jupyter-rlm demo

test: lint
	$(BIN)/python -m pytest

# The interpreter that has vLLM is RLM_VLLM_PYTHON, else one in .venv-vllm, made when it is not there.
test-vllm: $(VENV)/.test
	$(BIN)/python -m tests.vllm

lint: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .venv-vllm build dist demo.ipynb demo.rlm.sqlite*
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis

# A stamp for each set of packages, so that the second time nothing is asked of the index.
$(VENV)/.demo: EXTRAS := demo
$(VENV)/.test: EXTRAS := demo,test,lint
$(VENV)/.bench: EXTRAS := demo,bench
$(VENV)/.demo $(VENV)/.test $(VENV)/.bench: pyproject.toml $(BIN)/python
	@echo "Installing rlm-kernel[$(EXTRAS)] into $(VENV) ..."
	@$(INSTALL) --editable '.[$(EXTRAS)]'
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "make: there is no $(PYTHON); install Python 3.11 or newer, or give PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) is older than 3.11; give PYTHON=python3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "make: $(PYTHON) has no venv module; install it, such as with apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
