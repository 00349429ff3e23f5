# Two commands on a fresh machine do everything: `make demo` and `make test`.
BIN := .venv/bin

.PHONY: help setup demo test lint types pytest bench clean

help:
	@echo "make demo    set up what the demo needs, and run it"
	@echo "make test    set up what the tests need, and run linters, type checkers and tests"
	@echo "make setup   set up what the demo needs"
	@echo "make bench   run the benchmarks"

setup:
	@scripts/setup demo

demo: setup
	@$(BIN)/prorl-env demo

test:
	@scripts/setup test
	@$(MAKE) --no-print-directory lint types pytest

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy
	$(BIN)/pyright

pytest:
	$(BIN)/python -m pytest

bench:
	$(BIN)/prorl-env bench step

clean:
	rm -rf .venv .setup build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
