# Everything runs from `.venv`, made from requirements.lock by
# .ci/bootstrap.py; nothing but git, make and Python 3.12 has to be there.
# `make help` lists the targets.

# The first one that runs and is new enough: a pyenv shim may exist and refuse.
# If none is, any Python, so that the bootstrap can say what it found.
PYTHON ?= $(shell \
  for p in python3.12 python3 python3.13 python3.14 python; do \
    "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 12))' \
      >/dev/null 2>&1 && { echo "$$p"; exit; }; \
  done; \
  for p in python3 python; do \
    "$$p" -c '' >/dev/null 2>&1 && { echo "$$p"; exit; }; \
  done; \
  echo python3.12)
INTEROP_PYTHON ?= $(PYTHON)
BAZEL ?= bazel
UV_VERSION := 0.13.9
VENV := .venv
# Where `peftlib finetune` looks without --data.
DEMO_DATA := runs/demo-data
# Two workers on two cores; each test process computes on the CPU.
TEST_WORKERS ?= 2
ARGS ?=

BOOTSTRAP = @command -v "$(PYTHON)" >/dev/null 2>&1 || { \
    echo "No Python found: install Python 3.12, or name one:" \
      "make PYTHON=/path/to/python3.12" >&2; exit 2; }; \
  "$(PYTHON)" .ci/bootstrap.py

.DEFAULT_GOAL := help
.PHONY: help venv assets finetune test multiprocess-test oldest-venv \
  oldest-flax-test lint format types interop-venv interop-test tunix-venv \
  bench bench-quick bench-growth bazel-test bazel-files wheel wheel-test lock clean
# One thing after the other: `make -j` must not install into one folder twice.
.NOTPARALLEL:

help:  ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) \
	  | expand -t 20

venv:  ## Make .venv from requirements.lock.
	$(BOOTSTRAP) --venv=$(VENV) --lock=requirements.lock --project=.

assets: venv  ## Get the demo model (92 MB) into PEFTLIB_CACHE.
	@$(VENV)/bin/python -P peftlib/demo/assets.py

# Anew only when its generator has changed: the rows depend on nothing else.
$(DEMO_DATA)/train.jsonl: $(wildcard peftlib/demo/*.py) | venv
	@$(VENV)/bin/python -m peftlib.demo.orders --output=$(@D) && touch $@

finetune: assets $(DEMO_DATA)/train.jsonl  ## Fine-tune the demo model with QLoRA; more flags in ARGS.
	@$(VENV)/bin/peftlib finetune $(ARGS)

test: assets  ## Run the whole test suite; pytest's own flags in ARGS.
	@JAX_PLATFORMS=cpu $(VENV)/bin/python -m pytest -n $(TEST_WORKERS) $(ARGS)

multiprocess-test: venv  ## Run the tests of two processes, part of `test`.
	@JAX_PLATFORMS=cpu $(VENV)/bin/python -m pytest tests/multiprocess $(ARGS)

# Its flax goes on the path before the locked one.
oldest-venv: venv
	$(BOOTSTRAP) --venv=$(VENV)-oldest --lock=.ci/oldest.txt --space=200000000

oldest-flax-test: oldest-venv  ## Test filters with the oldest flax admitted.
	@export JAX_PLATFORMS=cpu; \
	PYTHONPATH="$$(echo $(CURDIR)/$(VENV)-oldest/lib/python*/site-packages)"; \
	export PYTHONPATH; \
	found=$$($(VENV)/bin/python -c 'import flax; print(flax.__version__)') && \
	grep -q "^flax==$$found " .ci/oldest.txt || { \
	  echo "flax $$found is not the version in .ci/oldest.txt" >&2; exit 2; }; \
	$(VENV)/bin/python -m pytest tests/transforms/filtering_test.py $(ARGS)

lint: venv  ## Check the code with ruff.
	@$(VENV)/bin/ruff check .

format: venv  ## Check the formatting; `ruff format .` changes it.
	@$(VENV)/bin/ruff format --check .

types: venv  ## Check the types with mypy.
	@$(VENV)/bin/mypy

interop-venv:
	$(BOOTSTRAP) --venv=$(VENV)-interop --python=$(INTEROP_PYTHON) \
	  --requirements=.ci/interop.txt --space=8000000000

interop-test: assets interop-venv  ## Compare with torch, transformers, peft.
	@JAX_PLATFORMS=cpu $(VENV)/bin/python tests/interop/run.py \
	  --interop_python=$(VENV)-interop/bin/python $(ARGS)

tunix-venv: venv
	$(BOOTSTRAP) --venv=$(VENV)-tunix --requirements=.ci/tunix.txt \
	  --space=3000000000

BENCH := $(VENV)/bin/python -m tests.benchmarks.bench \
  --interop_python=$(VENV)-interop/bin/python \
  --tunix_python=$(VENV)-tunix/bin/python

bench: assets interop-venv tunix-venv  ## Time a step and more beside HF peft, Tunix and others (40 minutes).
	@$(BENCH) $(ARGS)

bench-quick: assets interop-venv  ## Time the most important of it (8 minutes).
	@$(BENCH) --quick $(ARGS)

bench-growth: assets  ## Time a step against length, rank, layers, adapters, devices; plot it.
	@$(VENV)/bin/python -m tests.benchmarks.growth $(ARGS)

BAZEL_TESTS ?= //...
CONSUMER := tests/bazel_consumer
bazel-test: venv  ## Build and test all with Bazel, offline, and from a workspace that depends on this one.
	@command -v "$(BAZEL)" >/dev/null 2>&1 || { \
	  echo "No '$(BAZEL)' found: run" \
	    "'apt-get update && apt-get install bazel-bootstrap' as root," \
	    "or name one: make bazel-test BAZEL=/path/to/bazel" >&2; exit 2; }
	@$(VENV)/bin/python $(CONSUMER)/graph_check.py "$(BAZEL)"
	@cd $(CONSUMER) && $(BAZEL) test $(ARGS) //...
	@$(BAZEL) build //... && $(BAZEL) test $(ARGS) -- $(BAZEL_TESTS)

wheel: venv  ## Build a wheel and an sdist into dist/.
	@rm -rf build dist && $(VENV)/bin/python -c \
	  "from setuptools import build_meta as b; \
	  b.build_sdist('dist'); b.build_wheel('dist')" >build.log 2>&1 \
	  || { cat build.log; exit 1; }
	@rm build.log; ls dist/*

# With the versions of the lock, so that the index's newest don't decide.
wheel-test: wheel assets  ## Install the wheel into an empty environment and use it.
	@sed -n 's/^\([a-z0-9-]*==[^ ]*\).*/\1/p' requirements.lock \
	  >build/constraints.txt
	@$(VENV)/bin/python tests/wheel/run.py --commands \
	  --constraints=build/constraints.txt $(ARGS) dist/*.whl

bazel-files: venv  ## Write the BUILD files from the imports.
	@$(VENV)/bin/python tests/repository/bazel_files.py --write

lock:  ## Resolve the dependencies anew into requirements.lock.
	$(BOOTSTRAP) --venv=$(VENV)-lock --packages=uv==$(UV_VERSION)
	@$(PYTHON) .ci/bootstrap.py --write_lock=requirements.lock \
	  --uv=$(VENV)-lock/bin/uv

clean:  ## Remove what was made here, not the cached model.
	@rm -rf $(VENV) $(VENV)-interop $(VENV)-lock $(VENV)-oldest \
	  $(VENV)-tunix build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find peftlib transforms tests .ci -name __pycache__ -type d \
	  -prune -exec rm -rf {} +
