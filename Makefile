# Each target sets up all it needs in .venv, once; all that it asks for is Python 3.11 and pip.
#
#   PYTHON       interpreter that .venv is made with
#   TORCH        which torch to install
#   TORCH_INDEX  where from. By default the CPU build on Linux. For a GPU build, for example
#                make demo TORCH_INDEX=https://download.pytorch.org/whl/cu130
#                Empty: the package index that pip uses (on Linux that is a CUDA build, 3 GB).
#   ARGS         more arguments for pytest (make test ARGS="-k merge")

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
ifeq ($(origin TORCH_INDEX),undefined)
  # Who set PIP_FIND_LINKS keeps wheels of his own, so torch's as well.
  CPU_INDEX := $(if $(PIP_FIND_LINKS),,$(if $(filter Linux,$(shell uname -s)),https://download.pytorch.org/whl/cpu))
else
  CHOSEN_INDEX := $(TORCH_INDEX)
endif

BIN := .venv/bin
# uv looks where pip looks.
UV := VIRTUAL_ENV=.venv UV_FIND_LINKS="$${PIP_FIND_LINKS:-}" \
      $(if $(PIP_INDEX_URL),UV_DEFAULT_INDEX="$(PIP_INDEX_URL)") $(BIN)/uv pip
# Named after what it was made from, so that set-up runs again when that changes and never else.
INSTALLED := .venv/.installed-$(shell (cat pyproject.toml; echo $(TORCH) $(TORCH_INDEX)) | cksum | cut -d' ' -f1)
# One thread a process: the tests run processes side by side.
TEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 $(ARGS)

.PHONY: help setup demo test test-all lint protos clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      train a small model over three regions, in under four minutes"
	@echo "make test      the tests, in about ten minutes;  make test-all: the slow ones too"
	@echo "make lint      ruff, mypy, import-linter"
	@echo "make compose   the same run in containers, with docker or podman"
	@echo "make protos    generate halos/wire from protos/"
	@echo "make setup     only what the others do first: .venv with all dependencies"
	@echo "make clean     remove all that the above made, .venv too; runs/ stays"

setup: $(INSTALLED)

demo: setup
	@$(BIN)/halos demo

test: setup
	@$(TEST) -m "not slow"

test-all: setup
	@$(TEST)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# No gRPC stubs: halos/wire/rpc.py makes its calls of what serde.py says.
protos: setup
	@$(BIN)/python -m grpc_tools.protoc -I protos --python_out=. --pyi_out=. protos/halos/wire/v1/*.proto

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("halos needs Python 3.11 or newer, and %s is %d.%d: call make PYTHON=python3.11" % (sys.executable, *sys.version_info[:2]))'
	@echo "Setting up .venv; this happens once and takes about a minute."
	@echo "  1/3  a virtual environment, and uv to fill it"
	@test -x $(BIN)/python || $(PYTHON) -m venv --without-pip .venv
	@$(PYTHON) -m pip --python $(BIN)/python install -qq --disable-pip-version-check pip uv
	@echo "  2/3  $(TORCH)$(if $(CPU_INDEX), (CPU))$(if $(CHOSEN_INDEX), from $(CHOSEN_INDEX))"
ifneq ($(CPU_INDEX),)
	@$(UV) install --quiet --default-index $(CPU_INDEX) "$(TORCH)" \
	    || echo "       $(CPU_INDEX) cannot be used: taking the usual package index instead"
endif
ifneq ($(CHOSEN_INDEX),)
	@$(UV) install --quiet --default-index $(CHOSEN_INDEX) --reinstall-package torch "$(TORCH)"
endif
	@$(UV) install --quiet "$(TORCH)"
	@echo "  3/3  halos itself, its other dependencies, the tests' tools"
	@$(UV) install --quiet --compile-bytecode "$(TORCH)" --editable ".[dev]"
	@rm -f .venv/.installed-*
	@touch $@
	@echo "Ready."

# A run over three regions, every process in a container: some minutes, and some more to build the
# image. Needs docker with its compose plugin, or podman.
.PHONY: compose
compose: setup
	@test -x $(BIN)/podman-compose || command -v podman-compose >/dev/null \
	    || ! command -v podman >/dev/null || $(UV) install --quiet podman-compose
	@PATH="$(CURDIR)/$(BIN):$$PATH" deploy/run.sh $(ARGS)
