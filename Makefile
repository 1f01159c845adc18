# make train   create .venv, fetch the model, train CONFIG          make test    run the tests
# make bench   measure, and compare with the last records           make lint    ruff and mypy
# make venv    only the environment                                 make format  let ruff rewrite the code
# make test-fast   tests/unit without the slow tests: a minute, to run after every change
# make docs        the site of docs/, in build/site
# make test JOBS=1 ARGS="-x tests/unit"   only these tests, one file at a time
# make test ARGS="-m long"                the long tests, half an hour
# make bench BENCH=grpo_step ARGS="--rounds 2"   one benchmark of docs/results.md, with its own arguments
# Variables: CONFIG=configs/coding_warmup_cpu.yaml  ARGS="train.num_steps=50"  DEVICE=cpu|gpu  INSTALLER=auto|uv|pip  PYTHON=python3.12

CONFIG ?= configs/coding_warmup_cpu.yaml
DEVICE ?= cpu
INSTALLER ?= auto
ARGS ?=
BENCH ?=
# Test files that run in parallel: three for two cores, as tests spend much of their time waiting, and at most 24.
JOBS ?= $(shell n=$$(($$(nproc) * 3 / 2)); echo $$((n > 24 ? 24 : n > 3 ? n : 3)))
BIN := .venv/bin
# Our files are UTF-8, whatever the locale.
export PYTHONUTF8 := 1
# Empty: keep compiled bytecode even where an image or CI disables it; otherwise every test process compiles again.
export PYTHONDONTWRITEBYTECODE :=
# later: a module is compiled at its first import, which a fifth of them have. now: all, a minute more; for images.
BYTECODE ?= later

# The first interpreter that is new enough and can make environments: a version manager's stub or a Python without
# ensurepip can't.
SUITABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do "$$p" -c '$(SUITABLE)' 2>/dev/null && echo "$$p" && break; done)

.PHONY: train test test-fast bench lint format venv docs

venv:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 with venv is needed (Debian: apt-get install python3 python3-venv), or set PYTHON=/path/to/python"; exit 2; }
	@"$(PYTHON)" runtime_env/install.py --device $(DEVICE) --installer $(INSTALLER) --bytecode $(BYTECODE)

train: venv
	@$(BIN)/rayapp model fetch smollm2-135m
	@$(BIN)/rayapp train $(CONFIG) $(ARGS)

test: venv
	@$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder --durations 25 --durations-min 5 $(ARGS)

test-fast: venv
	@$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder -q -m "not slow and not long" tests/unit $(ARGS)

bench: venv
	@$(BIN)/rayapp model fetch smollm2-135m
	@$(BIN)/python -m benchmarks $(BENCH) $(if $(ARGS),-- $(ARGS))

lint: venv
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: venv
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# In a separate environment: the locks of runs don't hold the documentation's packages.
docs:
	@test -x build/docs-venv/bin/mkdocs || { "$(PYTHON)" -m venv build/docs-venv && build/docs-venv/bin/pip install --quiet -r runtime_env/requirements-docs.txt; }
	@NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --quiet && echo "build/site/index.html"
