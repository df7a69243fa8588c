# `make plan` and `make test` need Python (>= 3.11, with venv) and nothing else; both make .venv where it is missing.
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
CUDA_VENV := .venv-cuda

.PHONY: plan test lint docs dist install-check emulated traces soak clean

plan: $(VENV)/installed
	$(BIN)/planner max-batch --model vit_b_16 --gpu-mib 24000

test: lint dist
	$(BIN)/python -m pytest -n $(WORKERS)

# 1,000 runs of each kind: interrupted, concurrent, fuzzed; half an hour.
soak: $(VENV)/installed-dev
	$(BIN)/python -m pytest -s --runs 1000 tests/robustness/test_concurrency.py tests/robustness/test_fuzz.py

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict planner calibration
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror planner/emulator/csrc/*.[ch]

# The documentation as a site, in site/; a broken link ends it. `python -m mkdocs serve` shows it while one writes.
docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 PYTHONPATH="$(CURDIR)" $(BIN)/python -m mkdocs build --quiet

# The source distribution and, built from it, the wheel; tests/end_to_end/test_dist.py holds what is in them.
dist: $(VENV)/installed-dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

# The wheel with all its dependencies in an empty environment, from a folder outside of the repository.
install-check: dist
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(PYTHON) -m venv "$$folder/venv" && \
		"$$folder/venv/bin/python" -m pip install --quiet -c constraints.txt dist/*.whl && cd "$$folder" && \
		export XDG_CACHE_HOME="$$folder/cache" && \
		venv/bin/planner max-batch --model vit_b_16 --gpu-mib 24000 && \
		venv/bin/planner estimate --model torchvision:resnet18 --batch 8 --gpu "RTX 4090"

# Real training on emulated GPUs, and the tests of a real GPU on an emulated one: needs gcc and the CUDA build of torch,
# 5 GB, which has an environment of its own.
emulated: $(VENV)/installed-dev $(CUDA_VENV)/installed
	$(BIN)/python -m pytest tests/emulator tests/hardware/cudnn/test_client.py tests/hardware/cudnn/test_workspace_breakdown.py \
		--cuda-python "$(CURDIR)/$(CUDA_VENV)/bin/python" \
		--cudnn "$$($(CUDA_VENV)/bin/python -c 'import nvidia.cudnn as n; print(n.__path__[0])')/lib"
	PYTHONPATH="$(CURDIR)" $(BIN)/planner run --gpu "RTX 3090" --json -- \
		"$(CURDIR)/$(CUDA_VENV)/bin/python" -m pytest tests/gpu | \
		$(BIN)/python -c 'import json, sys; sys.exit(json.load(sys.stdin)["exit_code"])'

$(CUDA_VENV)/installed: Makefile
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet torch==2.13.0 torchvision==0.28.0 nvidia-ml-py \
		filelock hypothesis msgspec pytest pyyaml scipy torchinfo typer
	@$(CUDA_VENV)/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || \
		{ echo "pip found a build of torch without CUDA; see PIP_FIND_LINKS and pip config list" >&2; exit 1; }
	@touch $@

# The traces that ship with the planner; after a change of the tracer or of models.yaml.
traces: $(VENV)/installed-dev
	$(BIN)/python tools/bundle_programs.py

clean:
	rm -rf $(VENV) $(CUDA_VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "python3 -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

# What `planner` needs for the models of torchvision and for those of a user's own file.
$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV); torch is large, this takes a few minutes."
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

# All extras and the tools of the checks on top.
$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV); torch is large, this takes a few minutes."
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/installed
