# One command per need; each makes the environment in .venv first, and again when the pinned
# versions change.
#
#   make repro                  every figure, table and the report, as far as they are stale
#   make repro PROFILE=smoke    the same with the small numbers of the smoke profile
#   make repro SOURCE=real      on the real traces (after `hetero data fetch`)
#   make docs                   the pages of the documentation in pipelines/build/site
#   make test | lab | check | tools | clean
#   make setup | setup-tests    only the environment: for the pipeline, or with what the tests need
#   make lock                   the pinned packages again; ARGS=--upgrade takes the newest

VENV ?= .venv
# The first Python on the path for which packages are pinned; set PYTHON= to choose another.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for one in python3 python3.13 python3.12 python3.11 python; do \
	"$$one" -c '$(SUPPORTED)' 2>/dev/null && echo "$$one" && break; done)
BIN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.hetero-setup
STAMP_TESTS := $(VENV)/.hetero-setup-tests

define CHECK_PYTHON
@test -n "$(PYTHON)" || { echo "Error: hetero needs Python 3.11, 3.12 or 3.13, and none is on the path. Resolve: install one, or run make PYTHON=/path/to/python3." >&2; exit 1; }
@$(PYTHON) -c '$(SUPPORTED)' 2>/dev/null || { echo "Error: hetero needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is another or missing. Resolve: run make PYTHON=/path/to/such/a/python3." >&2; exit 1; }
endef

.PHONY: help setup setup-tests test repro lab docs check tools lock clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//; 1,11p' Makefile

setup: $(STAMP)

setup-tests: $(STAMP_TESTS)

$(STAMP): pyproject.toml constraints.txt pipelines/setup.py
	$(CHECK_PYTHON)
	@$(PYTHON) -P pipelines/setup.py $(VENV)
	@touch $@

$(STAMP_TESTS): pyproject.toml constraints.txt tests/constraints.txt pipelines/setup.py
	$(CHECK_PYTHON)
	@$(PYTHON) -P pipelines/setup.py $(VENV) --tests
	@touch $(STAMP) $@

test: setup-tests
	@$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal $(ARGS)

repro: setup
	@$(BIN)/hetero repro $(if $(PROFILE),--profile $(PROFILE)) $(if $(SOURCE),--source $(SOURCE))

lab: setup
	@$(BIN)/jupyter lab notebooks/00_quickstart.ipynb --ContentsManager.pre_save_hook=pipelines.source.before_save $(ARGS)

docs: setup-tests
	@$(BIN)/python -m pipelines.docs

check: setup-tests
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --num-workers 2 || $(BIN)/mypy  # its workers have seconds to start, which a busy machine needs
	@$(BIN)/lint-imports
	@$(BIN)/python -m pipelines.budgets
	@$(BIN)/nbstripout --verify --keep-id --extra-keys 'metadata.widgets metadata.papermill cell.metadata.execution cell.metadata.ExecuteTime cell.metadata.papermill' notebooks/*.ipynb

# vLLM's parser, SkyPilot's schemas and Rust routers, in an environment of their own beside the other: they pull
# in what the solvers cannot live with. With it, `make test` reads with them what is exported.
tools: setup-tests
	@$(BIN)/python -m venv pipelines/build/tools
	@pipelines/build/tools/bin/pip --disable-pip-version-check install -qq --no-deps --require-hashes -r tests/tools.txt
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(pipelines/build/tools/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/hetero.pth"

lock: setup
	@$(BIN)/python -m pipelines.lock $(ARGS)

clean:
	rm -rf pipelines/build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find hetero pipelines tests -name __pycache__ -type d -prune -exec rm -rf {} +
