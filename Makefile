# `make plan` and `make test` need Python (>= 3.11, with venv) and nothing else; both make .venv where it is missing.
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
CUDA_VENV := .venv-cuda

.PHONY: plan check test slow lint docs dist release install-check emulated soak ci clean

plan: $(VENV)/installed
	$(BIN)/planner max-batch --model vit_b_16 --gpu-mib 24000

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

# Tests that take seconds each: large models, many processes, the documentation's commands, tutorials.
slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) -m slow

# The inner loop: format, lint, types, contracts, and the tests of the packages without torch.
FAST := tests/_support tests/program tests/allocator tests/jobs tests/hardware tests/report
check: lint
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(FAST)

# 1,000 runs of each kind: interrupted, concurrent, fuzzed; 200 of each signal; an hour.
soak: $(VENV)/installed-dev
	$(BIN)/python -m pytest -s --runs 1000 --hypothesis-profile soak \
		tests/robustness/test_concurrency.py tests/robustness/test_fuzz.py \
		tests/robustness/test_signals.py tests/robustness/test_threads.py tests/robustness/test_bounded_files.py \
		tests/robustness/test_planted_caches.py tests/robustness/test_left_processes.py \
		tests/robustness/test_data_files.py tests/capture/test_settings.py

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict planner calibration
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror planner/emulator/csrc/*.[ch]

# The documentation as a site, in site/; a broken link ends it. `python -m mkdocs serve` shows it while one writes.
docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 PYTHONPATH="$(CURDIR)" $(BIN)/python -m mkdocs build --quiet

# The source distribution and, built from it, the wheel, with the programs of the catalogue's jobs: a minute.
dist: $(VENV)/installed-dev
	rm -rf dist
	PLANNER_CAPTURE_CATALOGUE=1 $(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

# What is in the distributions, and that an installed wheel answers.
release: dist
	$(BIN)/python -m pytest tests/end_to_end/test_dist.py --distributions "$(CURDIR)/dist"

# The whole of .ci/run on a clone of HEAD with fresh environments; ci-passed in the git directory then names HEAD.
ci:
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && commit=$$(git rev-parse HEAD) && \
		git clone --quiet --no-hardlinks . "$$folder/clone" && git -C "$$folder/clone" checkout --quiet "$$commit" && \
		(cd "$$folder/clone" && .ci/run) && echo "$$commit" > "$$(git rev-parse --git-dir)/ci-passed" && \
		echo "passed: $$commit"

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
	$(BIN)/python -m pytest -n $(WORKERS) tests/emulator tests/hardware/cudnn/test_client.py tests/hardware/cudnn/test_workspace_breakdown.py \
		--cuda-python "$(CURDIR)/$(CUDA_VENV)/bin/python" \
		--cudnn "$$($(CUDA_VENV)/bin/python -c 'import nvidia.cudnn as n; print(n.__path__[0])')/lib"
	PYTHONPATH="$(CURDIR)" $(BIN)/planner run --gpu "RTX 3090" --json -- \
		"$(CURDIR)/$(CUDA_VENV)/bin/python" -m pytest tests/gpu | \
		$(BIN)/python -c 'import json, sys; sys.exit(json.load(sys.stdin)["exit_code"])'

$(CUDA_VENV)/installed: Makefile
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet torch==2.13.0 torchvision==0.28.0 nvidia-ml-py \
		filelock hypothesis msgspec pytest pyyaml scipy torchinfo transformers==5.23.0 typer
	@$(CUDA_VENV)/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || \
		{ echo "pip found a build of torch without CUDA; see PIP_FIND_LINKS and pip config list" >&2; exit 1; }
	@touch $@

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
