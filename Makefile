# One command per need; each makes the environment in .venv first, and again when the pinned
# versions change.
#
#   make repro                  every figure, table and the report, as far as they are stale
#   make repro PROFILE=smoke    the same with the small numbers of the smoke profile
#   make repro SOURCE=real      on the real traces (after `hetero data fetch`)
#   make docs                   the pages of the documentation in pipelines/build/site
#   make test | lab | check | tools | clean

VENV ?= .venv
# The first Python on the path that is new enough; set PYTHON= to choose another.
PYTHON ?= $(shell for one in python3 python3.13 python3.12 python3.11 python; do \
	"$$one" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$one" && break; done)
BIN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.hetero-setup
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt

.PHONY: help setup test repro lab docs check tools clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//; 1,9p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Error: hetero needs Python 3.11 or newer, and none is on the path. Resolve: install it, or run make PYTHON=/path/to/python3."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Error: hetero needs Python 3.11 or newer, and $(PYTHON) is older or missing. Resolve: run make PYTHON=/path/to/a/newer/python3."; exit 1; }
	@echo "Setting up $(VENV) (once; takes a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# The build backend first, so that it comes pinned too.
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation --editable '.[pipeline,lab,bayes,serving,dask,ray,dev,docs]'
	@touch $@

test: setup
	@$(BIN)/python -m pytest $(ARGS)

repro: setup
	@$(BIN)/hetero repro $(if $(PROFILE),--profile $(PROFILE)) $(if $(SOURCE),--source $(SOURCE))

lab: setup
	@cd notebooks && $(BIN)/jupyter lab $(ARGS)

docs: setup
	@$(BIN)/python -m pipelines.docs

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/nbstripout --verify --keep-id --extra-keys 'metadata.widgets metadata.papermill cell.metadata.execution cell.metadata.ExecuteTime cell.metadata.papermill' notebooks/*.ipynb

# vLLM's parser and SkyPilot's schemas, in an environment of their own beside the other: they pull
# in what the solvers cannot live with, and several gigabytes. With it, `make test` reads with them
# what is exported.
tools: setup
	@$(BIN)/python -m venv pipelines/build/tools
	@pipelines/build/tools/bin/pip --disable-pip-version-check install -qq --no-deps -r tests/tools.txt
	@pipelines/build/tools/bin/pip --disable-pip-version-check install -qq skypilot==0.14.1
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(pipelines/build/tools/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/hetero.pth"

clean:
	rm -rf pipelines/build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find hetero pipelines tests -name __pycache__ -type d -prune -exec rm -rf {} +
