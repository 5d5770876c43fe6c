# Everything a newcomer needs: `make train`, `make test`. Only Python >= 3.11 with pip has to be there.
PYTHON ?= python3
TORCH_VERSION ?= 2.13.0

BIN := .venv/bin
STAMP := .venv/installed-$(TORCH_VERSION)

.PHONY: train test proof fuzz lint bench docs site wheel clean

train: $(STAMP)
	$(BIN)/onecard run --nproc_per_node 2 examples/gpt/train.py --mesh tp=2 --check 20

# Tests that run side by side; each may start as many processes as it has ranks. Lint runs beside them, and is said last.
WORKERS ?= 3

# What fails beside others is tried again alone. A part: make test ARGS=tests/test_mesh.py.
#
# One thread for each process: the tests start many, on few cores. Each start would compile the library again, and each
# worker the tests, where the environment forbids to keep what is compiled.
test: export OMP_NUM_THREADS = 1
test: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP)
	@mkdir -p logs; rm -f .pytest_cache/v/cache/lastfailed logs/failed_beside_others.txt
	@$(MAKE) --no-print-directory lint >logs/lint.txt 2>&1 & lint=$$!; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=25 $(ARGS); tests=$$?; \
	if [ $$tests = 1 ]; then $(BIN)/python tests/again.py; tests=$$?; fi; \
	wait $$lint || { cat logs/lint.txt; echo "make lint: failed, as shown above"; exit 1; }; \
	exit $$tests

# Before a release: all tests, programs, seeds, files, meshes and cells of tables, of which `make test` takes a share; and seeds
# that are new for each state of src.
proof:
	@ONECARD_PROOF=1 $(MAKE) --no-print-directory test

# Random training programs against plain torch, on real ranks. One again: make fuzz ARGS="--seed 17 --count 1".
fuzz: export OMP_NUM_THREADS = 1
fuzz: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m fuzz $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Some 30 minutes on 2 idle cores, of which 8 are the collectives and 9 the check that is always on. The sweep of torch's DTensor, 9 more, is left out: leave
# out its --libraries to have it.
bench: $(STAMP)
	$(BIN)/python benchmarks/eager_overhead.py
	$(BIN)/python benchmarks/new_shapes.py --shapes 1000 --settle 500
	$(BIN)/python benchmarks/gpt_tp.py
	$(BIN)/python benchmarks/manual.py
	$(BIN)/python benchmarks/random_numbers.py
	$(BIN)/python benchmarks/operator_sweep.py --libraries onecard
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/sparse_check.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/engine.py

docs: $(STAMP)
	$(BIN)/python -m onecard.rules.verify --markdown docs/rules.md

# All pages, the API and search, as files in site/: python -m http.server -d site. Every link is checked.
site: .venv/docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html; with search: $(BIN)/python -m http.server -d site --bind 127.0.0.1"

.venv/docs-installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	@touch $@

# Wheel and sdist, and the wheel in an empty environment: it imports, it is typed, the tutorial runs. Others: make wheel PYTHON=python3.13
wheel:
	$(PYTHON) tests/wheel.py --torch $(TORCH_VERSION) $(ARGS)

clean:
	rm -rf .venv logs build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone, so that the version asked for is the one that everything else settles with.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "onecard needs Python >= 3.11, and '$(PYTHON)' is `$(PYTHON) --version 2>&1`."; \
		echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "'$(PYTHON)' has no venv or ensurepip, with which 'make' would set up its own environment."; \
		echo "Debian and Ubuntu: apt install python3-venv. Or name another Python: make $(MAKECMDGOALS) PYTHON=..."; \
		exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==$(TORCH_VERSION)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test]"
	@rm -f .venv/installed-*
	@touch $@
