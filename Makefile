# Every target but help first makes .venv as it should be; `make demo` is the place to start.
.PHONY: help setup demo test lint
.DEFAULT_GOAL := help

help:
	@echo 'make demo    train the tiny model on arithmetic with 1 trainer and 1 searcher;'
	@echo '             config overrides: make demo ARGS="task=arithmetic model=tiny"'
	@echo 'make test    the tests that need neither a GPU nor a long time; ARGS goes to pytest'
	@echo 'make lint    ruff and mypy'
	@echo 'make setup   only install: .venv, with vLLM for CUDA or CPU by what the machine has;'
	@echo '             TBA_DEVICE=cpu|cuda and PYTHON=python3.12 choose by hand'

setup:
	@bash launch/setup.sh

demo: setup
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} .venv/bin/torchrun --standalone --nproc_per_node=2 train.py $(ARGS)

test: setup
	.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu" $(ARGS)

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
