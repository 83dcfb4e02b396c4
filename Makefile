# Every verb of the project. `make` alone prints them.
#
# On a fresh machine `make demo` and `make test` need Python >= 3.11, make and a C compiler: all else they install
# themselves, the packages into .venv, the test servers into a cache outside the checkout (see scripts/).

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-pythons test-spark test-spark-versions coverage check lint format types layers servers lock release bench bench-quick bench-report bench-wire profile clean words docs diagram screenshots chaos chaos-lake soak fuzz
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
# Arguments for pytest: make test ARGS="-k foo"
ARGS ?=

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## create .venv and install everything the project needs into it

# The stamp makes a second run instant, and a changed pyproject.toml or lock install again.
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

demo: setup ## watch a small shop's day on an embedded server (a quarter of a minute; with Java one more for the pipeline)
	@$(BIN)/tampu demo

# Tests in a Spark session are slow: those of the slice are part of the default run, `make test-spark` runs all of them.
DEFAULT_TESTS := (not spark_session and not spark_cluster) or spark_slice
# Tests that share a Spark session go to the same process; all others are distributed one by one.
PYTEST = -m pytest -n 2 --dist loadgroup

test: setup servers ## run all tests on real servers, in two processes; pytest arguments: make test ARGS="-k foo"
	@$(BIN)/python $(PYTEST) -m "$(DEFAULT_TESTS)" $(ARGS)

test-fast: setup ## for the edit loop: the quick tests that need only the embedded server (about a minute)
	@$(BIN)/python $(PYTEST) --fast -q -r fE $(ARGS)

coverage: setup servers ## make test with line and branch coverage of src/, and the gate of .ci/uncovered.toml
	@rm -rf build/coverage
	@$(BIN)/python -m coverage run $(PYTEST) -m "$(DEFAULT_TESTS)" $(ARGS)
	@$(BIN)/python scripts/check_coverage.py

PYTHONS ?= 3.13 3.14
test-pythons: setup servers ## all tests that need no Spark, under CPython 3.13 and 3.14 (built once, 5 minutes each)
	@set -e; for version in $(PYTHONS); do \
		python=$$($(BIN)/python scripts/install_pythons.py $$version); \
		environment=build/python-$$version; \
		[ -x $$environment/bin/python ] || $$python -m venv --clear $$environment; \
		$$environment/bin/python scripts/install_locked.py $$environment; \
		$$environment/bin/python $(PYTEST) -m "not spark_session and not spark_cluster" $(ARGS); \
	done

test-spark: setup servers ## all Spark tests: in a session, and on a standalone cluster of two workers
	@$(BIN)/python $(PYTEST) tests/spark $(ARGS)

SPARK_VERSIONS ?= 4.0 4.1 4.2
test-spark-versions: ## the connector under older versions of PySpark, each in an environment of its own
	@set -e; python=$$(sh scripts/find_python.sh); \
	for version in $(SPARK_VERSIONS); do \
		environment=build/pyspark-$$version; \
		$$python -m venv $$environment; \
		$$environment/bin/python -m pip install --quiet --disable-pip-version-check \
			-e '.[embedded,spark]' "pyspark==$$version.*" redis; \
		$$environment/bin/python tests/spark/smoke.py; \
	done

check: lint types layers words docs ## lint, types, layers, wording and the docs site: everything that is checked without running tests

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

words: setup ## check the wording of docs and source (scripts/wordcheck.py)
	@$(BIN)/python scripts/wordcheck.py

docs: setup ## build the documentation site into build/site, strictly and offline
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "docs: open build/site/index.html (for search: python -m http.server -d build/site)"

diagram: setup ## draw the diagram of docs/architecture.md
	@$(BIN)/python scripts/draw_architecture.py

screenshots: setup ## run the demo and draw the terminal pictures in docs/assets (half a minute)
	@$(BIN)/python scripts/make_screenshots.py $(ARGS)

servers: setup ## install the servers the tests run on (Redis 8.6 is built once, about 2 minutes)
	@$(BIN)/python scripts/install_servers.py
	@$(BIN)/python scripts/install_browser.py

lock: ## resolve all dependencies again, and write them with their hashes into requirements/
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
	compile --group release -c requirements/dev.txt -c requirements/build.txt -o requirements/release.txt

release: setup ## check, build and describe a release: VERSION=0.2.0; everything but the tag and the upload, into dist/
	@$(BIN)/python scripts/release.py $(VERSION)

bench: setup servers ## everybody in everything, then the page, plots and README's table (under 20 minutes)
	@$(BIN)/python scripts/install_peers.py --all || true
	@$(BIN)/python -m bench full --publish $(ARGS)

bench-quick: setup servers ## the bars: ours beside chasquimq 1.3.0, RSMQ's others and the limit (under 3 minutes)
	@$(BIN)/python -m bench quick $(ARGS)

bench-report: setup ## make docs/benchmarks.md, its plots and the README's table from a run: ARGS="--file RUN.json"
	@$(BIN)/python -m bench report $(ARGS)

bench-wire: setup ## time the codecs
	@$(BIN)/python bench/wire.py

# How long chaos, soak and fuzz run, and the seed that decides what happens: 0 = a random one, which is printed.
MINUTES ?=
SEED ?= 0
# Jobs of a chaos run in all; 500 a second by default.
JOBS ?= 0
IN_TESTS := cd tests && ../$(BIN)/python

chaos: setup servers ## workers and producers under faults, and the proof that nothing was lost or repeated (10 minutes)
	@$(IN_TESTS) -m chaos --minutes $(or $(MINUTES),10) --seed $(SEED) --jobs $(JOBS) $(ARGS)

chaos-lake: setup ## the data pipeline, killed at every step with 300,000 events, and compared with Polars (10 minutes)
	@$(BIN)/python tests/spark/lake_kills.py $(ARGS)

soak: setup servers ## a fleet under steady load: no growth of memory, descriptors, threads or keys (30 minutes)
	@$(IN_TESTS) -m chaos.soak --minutes $(or $(MINUTES),30) $(ARGS)

fuzz: setup ## every decoder with bytes that no writer ever wrote (5 minutes)
	@$(IN_TESTS) -m fuzz --minutes $(or $(MINUTES),5) --seed $(SEED) $(ARGS)

profile: setup servers ## flame graphs of our hot paths, into build/profile
	@$(BIN)/python -m bench.profile $(ARGS)

clean: ## remove .venv and every cache in the checkout (the server cache stays)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
