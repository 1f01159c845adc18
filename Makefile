# make train   create .venv, fetch the model, train CONFIG          make test    run the tests
# make bench   one GRPO step against TRL                            make lint    ruff and mypy
# make venv    only the environment                                 make format  let ruff rewrite the code
# make test JOBS=1 ARGS="-x tests/unit"   one after the other, and only these
# make test ARGS="-m long"                those that take half an hour more
# Variables: CONFIG=configs/coding_cpu.yaml  ARGS="train.num_steps=50"  DEVICE=cpu|gpu  INSTALLER=auto|uv|pip  PYTHON=python3.12

CONFIG ?= configs/coding_cpu.yaml
DEVICE ?= cpu
INSTALLER ?= auto
ARGS ?=
# Files of tests that run side by side: most of their time is waiting, for deadlines and for processes that start.
JOBS ?= 2
BIN := .venv/bin

# The first interpreter that is new enough and can make environments: a version manager's stub or a Python without
# ensurepip answers to the name, but can't.
SUITABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do "$$p" -c '$(SUITABLE)' 2>/dev/null && echo "$$p" && break; done)

.PHONY: train test bench lint format venv

venv:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 with venv is needed (Debian: apt-get install python3 python3-venv), or set PYTHON=/path/to/python"; exit 2; }
	@"$(PYTHON)" runtime_env/install.py --device $(DEVICE) --installer $(INSTALLER)

train: venv
	@$(BIN)/rayapp model fetch smollm2-135m
	@$(BIN)/rayapp train $(CONFIG) $(ARGS)

test: venv
	@$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

bench: venv
	@$(BIN)/python benchmarks/grpo_step.py $(ARGS)

lint: venv
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: venv
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
