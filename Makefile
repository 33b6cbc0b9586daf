# make demo   sets the machine up, builds, and shows what Longspan does
# make test   sets the machine up, builds, and runs every check
#
# LONGSPAN_PYTHON=/path/to/python3 uses an interpreter that already has torch
# >= 2.11 and installs nothing.

BUILD ?= build/dev
JOBS ?= $(shell nproc)
SHELL := /bin/bash
# What tools/setup said, read when a recipe runs.
PYTHON = "$$(tail -n 1 build/.python)"

# Some machines report AMX but hide its tiles; oneDNN must not try it there.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16
export CTEST_OUTPUT_ON_FAILURE := 1

.PHONY: demo test build setup lint format bench bench-cuda bench-gpu pictures wheel sanitize race mutate core clean help
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -n 6
	@echo "make lint, format, bench, bench-cuda, bench-gpu, pictures, wheel, sanitize, race, mutate, core, clean"

setup:
	@mkdir -p build
	@tools/setup > build/.python

build: setup
	@tools/configure $(BUILD) $(PYTHON)
	@ninja -C $(BUILD) -j $(JOBS) $(if $(CI),--quiet)

demo: build
	@PYTHONPATH=$(BUILD)/python $(PYTHON) examples/layouts.py --out build/demo
	@echo
	@PYTHONPATH=$(BUILD)/python $(PYTHON) examples/attention.py
	@echo
	@if $(PYTHON) -c 'import transformers' 2>/dev/null; then \
	  PYTHONPATH=$(BUILD)/python OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(PYTHON) -m torch.distributed.run \
	    --standalone --nproc-per-node 2 examples/hf_finetune.py --cp 2 --steps 4; \
	else echo "without transformers no model is trained here"; fi

lint: setup
	@tools/lint $(PYTHON) check

format: setup
	@tools/lint $(PYTHON) fix

# The values and their pictures by themselves, without torch.
core:
	@mkdir -p build
	@cmake -S . -B build/core -G Ninja -DLONGSPAN_BUILD_TORCH=OFF -DLONGSPAN_BUILD_CLI=OFF -DLONGSPAN_BUILD_BENCH=OFF -DLONGSPAN_WERROR=ON > build/core.log || { cat build/core.log; exit 1; }
	@ninja -C build/core -j $(JOBS) --quiet
	@ctest --test-dir build/core

sanitize: setup
	@cmake -S . -B build/sanitize -G Ninja -DLONGSPAN_BUILD_TORCH=OFF -DLONGSPAN_BUILD_BENCH=OFF -DLONGSPAN_WERROR=ON -DLONGSPAN_SANITIZE=address,undefined > build/sanitize.log || { cat build/sanitize.log; exit 1; }
	@ninja -C build/sanitize -j $(JOBS) --quiet

# The C++ tests of kernels and comm under the thread sanitizer; core starts no
# threads and shares nothing that changes.
race: setup
	@cmake -S . -B build/race -G Ninja -DLONGSPAN_PYTHON=$(PYTHON) -DLONGSPAN_BUILD_PYTHON=OFF -DLONGSPAN_BUILD_CLI=OFF -DLONGSPAN_BUILD_BENCH=OFF -DLONGSPAN_BUILD_CUDA=OFF -DLONGSPAN_SANITIZE=thread > build/race.log || { cat build/race.log; exit 1; }
	@ninja -C build/race -j $(JOBS) --quiet kernel_tests $$(cd build/race && ninja -t targets all | grep -o '^comm_tests:' | tr -d :)

# Flips lines one by one and shows that each flip makes a test fail.
mutate: build
	@tools/mutate build/mutate $(PYTHON)

wheel: setup
	@tools/wheel $(PYTHON)

test: build lint sanitize race wheel
	@tools/test $(BUILD) $(PYTHON)

bench: build
	@PYTHONPATH=$(BUILD)/python $(PYTHON) bench/run.py $(BUILD)
	@PYTHONPATH=$(BUILD)/python $(PYTHON) bench/attention.py $(BUILD)
	@PYTHONPATH=$(BUILD)/python $(PYTHON) bench/tiles.py $(BUILD)
	@PYTHONPATH=$(BUILD)/python $(PYTHON) bench/selected.py $(BUILD)
	@PYTHONPATH=$(BUILD)/python $(PYTHON) bench/models.py $(BUILD)

# One rank's share of a ring on a GPU.
bench-cuda: build
	@PYTHONPATH=$(BUILD)/python $(PYTHON) bench/ring_share.py $(BUILD)

# Selected keys on a GPU, with what it prints kept in bench/results.
bench-gpu: build
	@PYTHONPATH=$(BUILD)/python $(PYTHON) bench/selected_gpu.py --save bench/results

pictures: build
	@tools/draw-pictures $(BUILD)/cli/longspan

clean:
	rm -rf build
