VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
PYTEST := $(BIN)/python -m pytest --dist loadscope --no-loadscope-reorder --max-worker-restart 0
ARGS ?=

# The tests start hundreds of processes: none of them should compile what another has compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all check format bench bench-feed bench-server bench-spark bench-replication bench-verify bench-log bench-nodes bench-atomic bench-transactions bench-takeover bench-layers bench-publish soak clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## Make .venv with everything that development needs
	@:

demo: $(STAMP) ## Run the demo
	@$(BIN)/floodmark demo

# The tests make thousands of small sites and sync each write: in memory they do not wait for a disk.
MEMORY := $(shell [ "$$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $$4 }')" -gt 4000000 ] 2>/dev/null \
	&& echo /dev/shm)
test test-all soak: export TMPDIR := $(or $(TMPDIR),$(MEMORY),/tmp)

test: $(STAMP) ## Run the tests: each promise and each command once, in minutes (ARGS="-k name" picks some)
	@$(PYTEST) -n 4 --ignore tests/test_tidy.py $(ARGS)

# A third of the time of these tests is waiting for servers, Java and commands.
test-all: $(STAMP) ## Run all tests but the soaks: more ways, more examples
	@$(PYTEST) -n 5 -m "not soak" --hypothesis-profile test-all $(ARGS)

check: $(STAMP) ## Check format, lint, types, layers and tidiness
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy $(wildcard src tests benchmarks examples)
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -q tests/test_tidy.py

format: $(STAMP) ## Format the code and fix what ruff can fix
	@$(BIN)/ruff check --fix-only --quiet
	@$(BIN)/ruff format

bench: $(STAMP) ## Run the benchmarks
	@$(BIN)/python benchmarks/store.py $(ARGS)

bench-feed: $(STAMP) ## Measure feeds beside PostgreSQL, Redis and NATS (see benchmarks/README.md)
	@$(BIN)/python benchmarks/feed.py $(ARGS)

bench-server: $(STAMP) ## Measure the server beside Redis and PostgreSQL
	@$(BIN)/python benchmarks/server.py $(ARGS)

bench-spark: $(STAMP) ## Measure Spark on a site beside Parquet files and PostgreSQL
	@$(BIN)/python benchmarks/spark.py $(ARGS)

bench-replication: $(STAMP) ## Measure sites that copy each other: positions, lag, catching up, idling
	@$(BIN)/python benchmarks/replication.py $(ARGS)

bench-verify: $(STAMP) ## Measure verify beside datacompy, exceptAll and a join on Spark
	@$(BIN)/python benchmarks/verify.py $(ARGS)

bench-log: $(STAMP) ## Measure the batched log beside the bare one
	@$(BIN)/python benchmarks/log.py $(ARGS)

bench-takeover: $(STAMP) ## Measure how long writes stop when a node is lost or a partition moves
	@$(BIN)/python benchmarks/takeover.py $(ARGS)

bench-publish: $(STAMP) ## Measure publishing a data set beside our upsert and COPY into PostgreSQL
	@$(BIN)/python benchmarks/publish.py $(ARGS)

bench-layers: $(STAMP) ## Measure layers beside the plain calls that they are built on
	@$(BIN)/python benchmarks/layers.py $(ARGS)

bench-transactions: $(STAMP) ## Measure transactions beside plain puts and PostgreSQL
	@$(BIN)/python benchmarks/transactions.py $(ARGS)

bench-atomic: $(STAMP) ## Measure atomic batches and reads beside no control and two-phase locking
	@$(BIN)/python benchmarks/atomic.py $(ARGS)

bench-nodes: $(STAMP) ## Measure nodes on PostgreSQL beside a plain psycopg program
	@$(BIN)/python benchmarks/nodes.py $(ARGS)

# Each test is given out alone: a module may have ten thousand histories.
soak: $(STAMP) ## Run the tests that take minutes, two at a time: about six hours of processor time
	@$(PYTEST) --dist load --maxschedchunk 1 -n 2 -m soak --hypothesis-profile soak -o faulthandler_timeout=7200 $(ARGS)

clean: ## Remove .venv, caches and build results
	@rm -rf $(VENV) build dist src/*.egg-info .hypothesis .import_linter_cache \
		.mypy_cache .pytest_cache .ruff_cache
	@find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + \
		2>/dev/null || true

# The stamp is removed first and written last: a set-up that stopped half-way is
# begun again from nothing, a finished one is only brought up to date.
$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	if [ -f $(STAMP) ] && $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "Updating $(VENV)"; \
		rm -f $(STAMP); \
	else \
		python=; without_venv=; \
		for candidate in $(PYTHON) python3.13 python3.12 python3.11 python3 python3.14; do \
			"$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
				>/dev/null 2>&1 || continue; \
			if "$$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
				python=$$candidate; break; \
			fi; \
			without_venv=$${without_venv:-$$candidate}; \
		done; \
		if [ -z "$$python" ] && [ -n "$$without_venv" ]; then \
			package=$$("$$without_venv" -c \
				'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
			echo "$$without_venv cannot make virtual environments: venv or ensurepip is missing." >&2; \
			echo "On Debian or Ubuntu: apt install $$package. Then run make again." >&2; \
			exit 1; \
		elif [ -z "$$python" ]; then \
			echo "Floodmark needs Python 3.11 or later, and none was found." >&2; \
			echo "Install one, or name it: make setup PYTHON=/path/to/python3.11" >&2; \
			exit 1; \
		fi; \
		echo "Setting up $(VENV) with $$("$$python" --version) and the packages of constraints.txt"; \
		"$$python" -m venv --clear $(VENV); \
	fi; \
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,postgres,spark]'; \
	touch $(STAMP)
