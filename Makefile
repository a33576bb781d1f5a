# Every habit of the project. `make` alone lists them.
#   VENV=path    another virtual environment (default .venv)      PYTHON=python3.12   what makes it
#   TORCH=cpu    or cuda: which build of torch (default: cuda where nvidia-smi lists a GPU)
#   PY=python3   use this interpreter as it is; nothing is created or installed
#   K=expr       only the tests that match (pytest -k)
SHELL := /bin/bash
# Packages are installed uncompiled, and hundreds of processes here import torch: what one compiles, the next one finds.
export PYTHONDONTWRITEBYTECODE :=
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV ?= .venv
TORCH ?= auto
ifdef PY
ENSURE = @true
else
PY := $(VENV)/bin/python
ENSURE = @$(PYTHON) .ci/setup_env.py --venv $(VENV) --torch $(TORCH) --extra
endif
SELECT := $(if $(K),-k '$(K)')
# Tests that measure time or drive a browser run one by one; all others side by side, a process and a thread to a core.
ALONE := tests/browser $(addprefix tests/test_,notebooks.py workbench.py workbench_details.py bench.py interference.py \
  overload.py setup.py)
SIDE_BY_SIDE = OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal
# `$(call stage,name) command` prints how long the command took.
stage = @TIMEFORMAT='[$(strip $(1)): %0R s]'; time

# All tests with these flags, or those that match K: the second stage also runs, and tells, where the first one failed.
both = @TIMEFORMAT='[$(if $(K),pytest,pytest side by side): %0R s]'; failed=0; \
  $(if $(K),time $(PY) -m pytest $(1) $(SELECT) || failed=$$?, \
  time $(SIDE_BY_SIDE) $(1) $(addprefix --ignore=,$(ALONE)) || failed=$$?; \
  TIMEFORMAT='[pytest one by one: %0R s]'; time $(PY) -m pytest $(1) $(ALONE) || failed=$$?); exit $$failed

.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help setup setup-dev model lab test check static js climb bench gpu gpu-figures aot audit screenshot gallery nbval fmt clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup:  ## create the environment for using the workbench
	$(ENSURE) lab

setup-dev:  ## the same, with everything the tests need
	$(ENSURE) dev

model: setup  ## fetch the default model (98 MB, once)
	@$(PY) -c "from strata_lab.config import DEFAULT_MODEL as name; from strata_lab.models.hub import install_model; install_model(name, print)"

lab: setup model  ## set everything up and open the workbench in JupyterLab
	@$(PY) -m jupyter lab notebooks/00_workbench.ipynb \
	  --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate --LabApp.extension_manager=readonly \
	  $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_FLAGS)

test: setup-dev model static js  ## set up and run everything that CI runs
	$(call both,)

check: setup-dev model static js  ## the quick part of `make test`: no test marked slow
	$(call both,-m 'not slow')

static: setup-dev  ## ruff, formatting and types
	$(call stage, ruff) $(PY) -m ruff check .
	$(call stage, format) $(PY) -m ruff format --check .
	$(call stage, mypy) $(PY) -m mypy

js:  ## the widgets' JavaScript tests
	@if ! command -v node >/dev/null; then echo "node is not installed: the widgets' JavaScript tests are left out"; \
	else TIMEFORMAT='[node: %0R s]'; time (cd widgets && node --test js_tests/*.test.js); fi

climb: setup model  ## measure every stage from nothing to everything on; table and HTML under artifacts/
	@mkdir -p artifacts
	@$(PY) -m strata_lab.cli climb --html artifacts/climb.html | tee artifacts/climb.txt

bench: setup-dev model  ## compare with transformers and llama.cpp where they are installed
	@$(PY) -m strata_lab.bench.compare

gpu: setup-dev  ## the tests that need a CUDA device
	@mkdir -p artifacts && $(PY) -m pytest tests/gpu tests/kernels -m "not host" $(SELECT) --junitxml=artifacts/gpu.xml
	@$(PY) -m pytest tests/test_bench*.py -m gpu $(SELECT)
	$(if $(K),,@$(PY) -m strata_lab.bench.gpu_record artifacts/gpu.xml)

gpu-figures: setup-dev  ## reproduce the GPU figures on your card, tests first; K=climb for some stages
	@$(PY) -m strata_lab.bench.gpu_session $(if $(K),--only '$(K)')

aot: setup-dev  ## compile the Triton kernels for sm_89, sm_90 and sm_120; needs no GPU
	@$(PY) -m strata_lab.kernels.gpu.aot

audit: setup-dev  ## look for known weaknesses: bandit over the code, pip-audit over what is installed (asks the network)
	@$(PY) -m pip install --quiet bandit pip-audit
	@$(PY) -m bandit --quiet --configfile pyproject.toml --recursive strata_lab widgets/strata_widgets
	@$(PY) -m pip_audit --progress-spinner off

screenshot: setup-dev model  ## take the README's picture: the workbench in a real browser, mid-decode
	@$(PY) -m tests.browser.screenshot docs/workbench.png

gallery: setup-dev model  ## execute every notebook; copies and HTML pages under artifacts/gallery
	@$(PY) -m strata_lab.lessons.gallery artifacts/gallery --only '$(K)'

nbval: setup-dev model  ## run the committed notebooks as they are, with nbval
	@$(PY) -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout=300 -p no:cacheprovider notebooks/*.ipynb

fmt: setup-dev  ## format, and fix what can be fixed
	@$(PY) -m ruff check --fix . ; $(PY) -m ruff format . ; $(PY) -m nbstripout --keep-id notebooks/*.ipynb

clean:  ## remove everything that was generated, but not the environment
	@rm -rf artifacts dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find strata_lab widgets tests -name __pycache__ -prune -exec rm -rf {} +
