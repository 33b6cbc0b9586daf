# make demo   sets the machine up, builds, and shows what Longspan does
# make test   sets the machine up, builds, and runs every test
#
# LONGSPAN_PYTHON=/path/to/python3 uses an interpreter that already has torch
# >= 2.11 and installs nothing. LONGSPAN_CUDA=1 compiles code for CUDA also
# where there is no GPU.

BUILD ?= build/dev
SHELL := /bin/bash
# What tools/setup said, read when a recipe runs.
PYTHON = "$$(tail -n 1 build/.python)"

# Some machines report AMX but hide its tiles; oneDNN must not try it there.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16
export CTEST_OUTPUT_ON_FAILURE := 1

.PHONY: demo test test-fast deep build setup lint format core sanitize race alone wheel cuda mutate
.PHONY: wheels fuzz sweep sweep-newest bench bench-build bench-cuda bench-gpu pictures clean help
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -n 6
	@echo "make build, test-fast, lint, format    while you work"
	@echo "make deep                              what CI adds: the longest tests, sanitize, race, alone, wheel, cuda, a sample of mutate"
	@echo "make fuzz                              random calls that must be refused in our words"
	@echo "make sweep, sweep-newest               every causal family of transformers, as docs/families.md"
	@echo "make wheels                            for a cluster, named by torch, each tried"
	@echo "make bench, bench-build, bench-cuda, bench-gpu, core, pictures, clean"

setup:
	@mkdir -p build
	@tools/setup > build/.python

build: setup
	@tools/build $(BUILD) $(PYTHON) longspan_all

demo: setup
	@tools/demo $(BUILD) $(PYTHON)

test: setup
	@tools/test $(BUILD) $(PYTHON)

# Under three minutes on a built tree.
test-fast: setup
	@tools/test $(BUILD) $(PYTHON) fast

deep: setup
	@tools/deep $(BUILD) $(PYTHON)

sanitize race alone wheel cuda: setup
	@tools/deep $(BUILD) $(PYTHON) $@

# Named by torch, with and without code for CUDA, each tried in an environment of its own;
# KINDS=cpu for one of them.
wheels: setup
	@tools/wheels $(PYTHON) $(KINDS)

lint: setup
	@tools/lint $(PYTHON) check

format: setup
	@tools/lint $(PYTHON) fix

# The values and their pictures by themselves, without torch.
core:
	@mkdir -p build
	@cmake -S . -B build/core -G Ninja -DLONGSPAN_BUILD_TORCH=OFF -DLONGSPAN_BUILD_CLI=OFF -DLONGSPAN_BUILD_BENCH=OFF -DLONGSPAN_WERROR=ON > build/core.log || { cat build/core.log; exit 1; }
	@ninja -C build/core --quiet
	@ctest --test-dir build/core

# Random calls, most of them wrong, in processes that are watched; CALLS=1000000
# for a long run, SEED for another one.
CALLS ?= 10000
SEED ?= 1
fuzz: setup
	@tools/build $(BUILD) $(PYTHON) longspan_all core_fuzz
	@PYTHONPATH=$(BUILD)/python $(PYTHON) tools/fuzz $(BUILD) --calls $(CALLS) --seed $(SEED)

# Every causal family of the installed transformers over ranks; makes docs/families.md.
sweep: build
	@PYTHONPATH=$(BUILD)/python:tests:tests/python OMP_NUM_THREADS=1 $(PYTHON) -m sweep --page docs/families.md

# The same with the newest transformers, which stays outside of the environment; a weekly job.
sweep-newest: build
	@tools/sweep-newest $(BUILD) $(PYTHON)

# Flips lines one by one and shows that each flip makes a test fail.
mutate: setup
	@tools/mutate build/mutate $(PYTHON)

bench: setup
	@tools/build $(BUILD) $(PYTHON) all
	@for part in run attention tiles selected models loss; do \
	  PYTHONPATH=$(BUILD)/python $(PYTHON) bench/$$part.py $(BUILD) || exit 1; done
	@PYTHONPATH=$(BUILD)/python:bench $(PYTHON) compat/nemo/bench/drop_in.py $(BUILD)

# From nothing to the demo and the tests, in a clone of its own.
bench-build: setup
	@$(PYTHON) bench/build.py --save bench/results

# One rank's share of a ring on a GPU.
bench-cuda: build
	@PYTHONPATH=$(BUILD)/python $(PYTHON) bench/ring_share.py $(BUILD)

# Dense attention, selected keys and a packed training step on a GPU, with what they
# print kept in bench/results; the loss, layers of families and a long step, printed.
bench-gpu: build
	@PYTHONPATH=$(BUILD)/python $(PYTHON) bench/dense_gpu.py --save bench/results
	@PYTHONPATH=$(BUILD)/python $(PYTHON) bench/selected_gpu.py --save bench/results
	@PYTHONPATH=$(BUILD)/python $(PYTHON) bench/packed_step.py --save bench/results
	@for part in loss model_layers_gpu; do \
	  PYTHONPATH=$(BUILD)/python $(PYTHON) bench/$$part.py $(BUILD) || exit 1; done
	@PYTHONPATH=$(BUILD)/python $(PYTHON) bench/long_step.py

pictures: build
	@tools/draw-pictures $(BUILD)/cli/longspan

clean:
	rm -rf build
