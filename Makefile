# All commands of the project. `make` without arguments lists them.
#
# On a new machine, `make demo` and `make test` need only Python >= 3.11, make and a C compiler. They install everything
# else: packages into .venv, test servers into a cache outside the checkout (see scripts/).

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-servers test-pythons test-spark test-spark-versions coverage check lint format types layers size servers lock release bench bench-quick bench-report bench-wire bench-codecs profile clean docs diagram screenshots chaos chaos-lake soak fuzz
MAKEFLAGS += --no-print-directory

# Variables that the command line may set. Others are refused: `make chaos SECONDS=60` would run for 10 minutes.
SETTINGS := ARGS COVERAGE JOBS MINUTES PROCESSES PYTHONS SEED SPARK_VERSIONS VENV VERSION
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))
ifneq ($(filter-out $(SETTINGS),$(GIVEN)),)
$(error unknown variable: $(filter-out $(SETTINGS),$(GIVEN)); allowed: $(SETTINGS))
endif

VENV := .venv
BIN := $(VENV)/bin
# Arguments for pytest: make test ARGS="-k foo"
ARGS ?=

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## create .venv and install everything the project needs into it

# The stamp file makes a second run instant; a change to pyproject.toml or to a lock file installs again.
$(VENV)/.installed: pyproject.toml requirements/build.txt requirements/dev.txt scripts/find_python.sh
	@set -e; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		python=$$(sh scripts/find_python.sh); \
		echo "setup: creating $(VENV) with $$python ($$($$python --version))"; \
		$$python -m venv --clear $(VENV); \
	fi
	@echo "setup: installing the packages locked in requirements/ into $(VENV) (a minute the first time)"
	@$(BIN)/python scripts/install_locked.py $(VENV)
	@touch $@
	@echo "setup: done"

demo: setup ## watch a small shop's day on an embedded server (15 seconds; about a minute more for Spark, if Java is installed)
	@$(BIN)/tampu demo

# Tests in a Spark session are slow: the default run includes only those marked spark_slice, `make test-spark` runs all.
DEFAULT_TESTS := (not spark_session and not spark_cluster) or spark_slice
# Tests that share a Spark session go to the same process; all others are distributed one by one. Most tests wait rather
# than compute, so more processes than cores take less time; on two cores, with four of them, 8.6 minutes. Beside other
# work, tests with short leases fail then.
PROCESSES ?= 3
PYTEST = -m pytest -n $(PROCESSES) --dist loadgroup

# COVERAGE=1 measures the lines and branches of src/ that the tests run, and checks the limits (.ci/uncovered.toml).
test: setup servers ## run all but the slow Spark tests on real servers, in three processes; pytest arguments: ARGS="-k foo"
	@$(if $(COVERAGE),rm -rf build/coverage)
	@$(BIN)/python $(if $(COVERAGE),-m coverage run) $(PYTEST) -m "$(DEFAULT_TESTS)" $(ARGS)
	@$(if $(COVERAGE),$(BIN)/python scripts/check_coverage.py)

test-servers: setup servers ## run the tests that `make test` runs on one kind of server on all five (nightly, about 20 minutes)
	@$(BIN)/python $(PYTEST) -m "$(DEFAULT_TESTS)" --all-servers $(ARGS)

test-fast: setup ## run the quick tests that need only the embedded server, while you edit (about a minute)
	@$(BIN)/python $(PYTEST) --fast -q -r fE $(ARGS)

coverage: ## run the tests with line and branch coverage of src/, and check the limits (.ci/uncovered.toml)
	@$(MAKE) test COVERAGE=1

PYTHONS ?= 3.13 3.14
test-pythons: setup servers ## run all tests that need no Spark under CPython 3.13 and 3.14 (built once, 5 minutes each)
	@set -e; for version in $(PYTHONS); do \
		python=$$($(BIN)/python scripts/install_pythons.py $$version); \
		environment=build/python-$$version; \
		[ -x $$environment/bin/python ] || $$python -m venv --clear $$environment; \
		$$environment/bin/python scripts/install_locked.py $$environment; \
		$$environment/bin/python $(PYTEST) -m "not spark_session and not spark_cluster" $(ARGS); \
	done

test-spark: setup servers ## run all Spark tests, in a local session and on a standalone cluster of two workers
	@$(BIN)/python $(PYTEST) tests/spark $(ARGS)

SPARK_VERSIONS ?= 4.0 4.1 4.2
test-spark-versions: ## test the Spark connector under older versions of PySpark, each in a separate environment
	@set -e; python=$$(sh scripts/find_python.sh); \
	for version in $(SPARK_VERSIONS); do \
		environment=build/pyspark-$$version; \
		$$python -m venv $$environment; \
		$$environment/bin/python -m pip install --quiet --disable-pip-version-check \
			-e '.[embedded,spark]' "pyspark==$$version.*" redis; \
		$$environment/bin/python tests/spark/smoke.py; \
	done

check: lint types layers size docs ## lint, types, import layers, size and the docs site: every check except the tests

lint: setup ## ruff: rules and formatting
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

format: setup ## ruff: reformat and fix what can be fixed safely
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

types: setup ## mypy --strict on src/, and on the tests as strictly as tests/mypy.toml says
	@$(BIN)/mypy --strict src
	@$(BIN)/mypy --config-file tests/mypy.toml

layers: setup ## import-linter: imports only point downwards
	@$(BIN)/lint-imports

size: setup ## compare the lines and files of src/ with their ceilings (.ci/ceilings.toml)
	@$(BIN)/python scripts/check_size.py

docs: setup ## build the documentation site into build/site, strictly and offline
	@# Not with --quiet: it silences the warnings that --strict counts.
	@said=$$(NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict 2>&1) || { echo "$$said" | grep -v ^INFO; exit 1; }
	@echo "docs: open build/site/index.html (for search: python -m http.server -d build/site)"

diagram: setup ## draw the diagram of docs/architecture.md
	@$(BIN)/python scripts/draw_architecture.py

screenshots: setup ## run the demo and draw the terminal pictures in docs/assets (half a minute)
	@$(BIN)/python scripts/make_screenshots.py $(ARGS)

servers: setup ## install the servers the tests run on (Redis 8.6 is built once, about 2 minutes)
	@$(BIN)/python scripts/install_servers.py
	@$(BIN)/python scripts/install_browser.py

lock: ## resolve all dependencies again and write them, with hashes, to requirements/
	@set -e; \
	tools=$$(mktemp -d); trap 'rm -rf "$$tools"' EXIT; \
	echo "lock: resolving all dependencies"; \
	python=$$(sh scripts/find_python.sh); \
	$$python -m venv "$$tools"; \
	"$$tools/bin/pip" install --quiet --disable-pip-version-check uv; \
	compile() { "$$tools/bin/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-header --no-annotate "$$@"; }; \
	compile --all-extras pyproject.toml -o requirements/dev.txt; \
	compile --group build -c requirements/dev.txt -o requirements/build.txt; \
	compile --group browser -c requirements/dev.txt -o requirements/browser.txt; \
	compile --group release -c requirements/dev.txt -c requirements/build.txt -o requirements/release.txt

release: setup ## check and build a release into dist/, with an SBOM and provenance (VERSION=0.2.0); tag and upload it yourself
	@$(BIN)/python scripts/release.py $(VERSION)

bench: setup servers ## run all benchmarks with all peers, then update the page, the plots and the README's table (about 15 minutes)
	@$(BIN)/python scripts/install_peers.py --all || true
	@$(BIN)/python -m bench full --publish $(ARGS)

bench-quick: setup servers ## measure only the targets, against chasquimq 1.3.0, other RSMQ clients and the upper bound (about 4 minutes)
	@$(BIN)/python -m bench quick $(ARGS)

bench-report: setup ## generate docs/benchmarks.md, its plots and the README's table from a run: ARGS="--file RUN.json"
	@$(BIN)/python -m bench report $(ARGS)

bench-wire: setup ## time the codecs
	@$(BIN)/python bench/wire.py

bench-codecs: setup servers ## measure what signed and encrypted payloads cost a worker (about 30 seconds)
	@$(BIN)/python -m bench.codecs $(ARGS)

# Duration of chaos, soak and fuzz runs, and the seed of their random choices: 0 = a random seed, which is printed.
MINUTES ?=
SEED ?= 0
# Total number of jobs in a chaos run; 0 = 500 per second.
JOBS ?= 0
IN_TESTS := cd tests && ../$(BIN)/python

chaos: setup servers ## run workers and producers under injected faults, and check that no job was lost or repeated (10 minutes)
	@$(IN_TESTS) -m chaos --minutes $(or $(MINUTES),10) --seed $(SEED) --jobs $(JOBS) $(ARGS)

chaos-lake: setup ## kill the data pipeline at every step, and compare its tables with Polars (300,000 events, 10 minutes)
	@$(BIN)/python tests/spark/lake_kills.py $(ARGS)

soak: setup servers ## run workers under steady load, and check that memory, descriptors, threads and keys do not grow (30 minutes)
	@$(IN_TESTS) -m chaos.soak --minutes $(or $(MINUTES),30) $(ARGS)

fuzz: setup ## feed random and mutated bytes to every decoder (5 minutes)
	@$(IN_TESTS) -m fuzz --minutes $(or $(MINUTES),5) --seed $(SEED) $(ARGS)

profile: setup servers ## draw flame graphs of tampu's hot paths into build/profile
	@$(BIN)/python -m bench.profile $(ARGS)

clean: ## remove .venv and every cache in the checkout (the server cache stays)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
