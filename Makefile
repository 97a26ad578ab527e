# Every target sets up what it needs in .venv by itself. Requires python3 (3.11+), a C++17 compiler and make.
#   make demo | test | test-change | test-all | test-every | test-hard | test-matrix | lint | docs | bench | build | wheel | gpu-check
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LIBRARY := jax_bwgemm/_lib/libjax_bwgemm_ffi.so
FFI_SOURCES := $(wildcard ffi/*.cc ffi/*.h) ffi/CMakeLists.txt jax_bwgemm/_version.py
# The XLA FFI headers: those of the oldest supported jaxlib, or XLA_FFI_INCLUDE_DIR=<jaxlib>/include.
JAXLIB_PIN := $(shell sed -n 's/^ *"jaxlib==\(.*\)",/\1/p' pyproject.toml)
HEADERS := build/jaxlib-$(JAXLIB_PIN)
XLA_FFI_INCLUDE_DIR ?= $(HEADERS)/jaxlib/include
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' jax_bwgemm/_version.py)
# The kernels that the example can choose; `make build` and `make test` build the whole catalogue.
DEMO_ONLY := *_bf16_bf16_bf16_knn_*_identity

JOBS := $(shell nproc)
MAKEFLAGS += --jobs=2 --no-print-directory  # the library compiles while pip installs
.DELETE_ON_ERROR:
.PHONY: demo test test-change test-all test-every test-hard test-matrix lint docs bench build wheel gpu-check clean
.PHONY: matrix-oldest matrix-newest

# With an NVIDIA GPU, JAX has its plugin for CUDA, and multiplies there: `make demo GPU=` does without.
GPU := $(or $(wildcard /proc/driver/nvidia/version),$(shell nvidia-smi -L 2>/dev/null))

demo: $(VENV)/build.stamp $(if $(GPU),$(VENV)/cuda.stamp) $(LIBRARY)
	$(BIN)/python -m jax_bwgemm build --only '$(DEMO_ONLY)'
	$(BIN)/python examples/quickstart.py

build: $(VENV)/build.stamp $(LIBRARY)
	$(BIN)/python -m jax_bwgemm build

# `test-all` adds what takes longest, every kernel in the emulator above all. What tests need is there: one that is skipped
# hides something, and fails (tests/completeness.py). XLA compiles what runs once with little effort: a quarter less time.
PYTEST = JAX_BWGEMM_COMPLETE=1 JAX_DISABLE_MOST_OPTIMIZATIONS=1 OPENBLAS_NUM_THREADS=1 \
  $(BIN)/python -m pytest -n auto --dist worksteal
test: $(VENV)/test.stamp build
	$(PYTEST) -m "not long"

test-all: test
	$(PYTEST) -m long

# What a change waits for: of what takes longest a twentieth, another one with each commit (tests/shares.py). All of `.ci/run`
# is to end within an hour on two cores, of which a slow hour's build takes 25 minutes, and the short tests 20.
SHARES := 20
test-change: test
	JAX_BWGEMM_SHARE=$$(git rev-list --count HEAD 2>/dev/null || echo 0)/$(SHARES) $(PYTEST) -m long

# The library under sanitizers and a failing driver, and much random input: 7 to 9 minutes of two cores.
FUZZ := 8
test-hard: $(VENV)/test.stamp $(LIBRARY)
	$(BIN)/python -m pytest tests/hard -n auto --dist loadgroup
	JAX_BWGEMM_FUZZ=$(FUZZ) OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest tests/cpu -m fuzz -n auto --dist worksteal

# The longest tests, each kernel of theirs under every schedule, where `make test-all` takes turns.
test-every: test
	JAX_BWGEMM_FUZZ=2 $(PYTEST) -m long

# What JAX sees, under the oldest and the newest that is supported: the newest JAX wants a newer Python, as in
#   make test-matrix PYTHON_NEWEST=python3.13
PYTHON_NEWEST ?= $(PYTHON)
OLDEST_JAX := $(shell sed -n 's/^dependencies = \["jax>=\([0-9.]*\)".*/\1/p' pyproject.toml)
MATRIX_TESTS := $(addprefix tests/cpu/test_,partition.py collectives.py install.py record.py transforms.py lowering.py \
  lowering_epilogue.py lowering_fallback.py lowering_precision.py lowering_tf32.py dot_general.py dtypes.py \
  shape_rules.py config.py explain.py input.py docs.py accelerate.py blocks.py gradient_sums.py) tests/emu/test_jax.py
MATRIX_RUN = $(1) -m venv build/matrix/$@ && \
  build/matrix/$@/bin/python -m pip install --quiet --disable-pip-version-check --upgrade $(2) numpy rich \
  $$(sed -n 's/^  "\(\(hypothesis\|pytest\|pytest-xdist\)==.*\)",/\1/p' pyproject.toml) && \
  OPENBLAS_NUM_THREADS=1 build/matrix/$@/bin/python -m pytest -n auto --dist worksteal $(MATRIX_TESTS)

test-matrix: matrix-oldest
	$(MAKE) matrix-newest

matrix-oldest: build
	$(call MATRIX_RUN,$(PYTHON),jax==$(OLDEST_JAX) jaxlib==$(OLDEST_JAX))

matrix-newest: build
	$(call MATRIX_RUN,$(PYTHON_NEWEST),jax jaxlib)

# dist/: a wheel a machine, whose library needs a glibc of 2.28 and whose cubins are the same, and the sources; audited,
# and installed where nothing but jax is (tests/wheel). PYTHON_NEWEST as above.
MACHINES := x86_64 aarch64
wheel: build $(VENV)/wheel.stamp
	$(BIN)/python -m jax_bwgemm build --packs build/packs
	rm -rf dist
	$(BIN)/pyproject-build --no-isolation --skip-dependency-check --sdist --outdir dist
	$(foreach machine,$(MACHINES),$(call WHEEL,$(machine)) &&) true
	$(BIN)/python -m zipfile -l dist/*_x86_64.whl
	$(foreach machine,$(MACHINES),$(BIN)/auditwheel show dist/*_$(machine).whl &&) true
	ls -l dist
	JAX_BWGEMM_WHEELS=dist JAX_BWGEMM_PYTHON_NEWEST=$(PYTHON_NEWEST) $(BIN)/python -m pytest tests/wheel

WHEEL = _PYTHON_HOST_PLATFORM=manylinux_2_28_$(1) ZIG_GLOBAL_CACHE_DIR=$(CURDIR)/build/zig \
  $(BIN)/pyproject-build --no-isolation --skip-dependency-check --wheel --outdir dist \
  -Cbuild-dir=build/wheel/$(1) -Cinstall.strip=false -Ccmake.define.JAX_BWGEMM_PACKS=$(CURDIR)/build/packs \
  -Ccmake.define.XLA_FFI_INCLUDE_DIR=$(abspath $(XLA_FFI_INCLUDE_DIR)) \
  -Ccmake.define.CMAKE_TOOLCHAIN_FILE=$(CURDIR)/cmake/zig.cmake -Ccmake.define.JAX_BWGEMM_MACHINE=$(1) \
  -Ccmake.define.JAX_BWGEMM_ZIG=$$($(BIN)/python -c 'import ziglang as z; print(z.__path__[0])')/zig

lint: $(VENV)/lint.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror ffi/*.cc ffi/*.h

# build/docs: the pages, whose warnings are errors, and the tests of what was built.
docs: $(VENV)/docs.stamp
	rm -rf build/docs
	$(BIN)/python -m sphinx -b html -W --keep-going -q -d build/doctrees docs build/docs
	$(BIN)/python -m pytest tests/docs
	@echo "build/docs/index.html"

bench: $(VENV)/bench.stamp build
	$(BIN)/python -m jax_bwgemm bench

# On a GPU machine, offline: the library against PYTHON's own jaxlib, cubins that were built before, no pip. With
# pytest-xdist several processes share the GPU, 8 in 8 minutes on an H200 (pytest-benchmark would warn of it: an error).
# LONG=1 adds the long runs, 10,000 batch-invariant products and kernels under compute-sanitizer: some hours.
GPU_PROCESSES := 8
SOAK_MINUTES := 15
gpu-check: export JAX_BWGEMM_BATCH_CASES ?= $(if $(LONG),10000,300)
gpu-check:
	cmake -S ffi -B build/ffi-gpu -DSKBUILD=1 -DPython_EXECUTABLE="$$(command -v $(PYTHON))" \
	  -DJAX_BWGEMM_VERSION=$(VERSION)
	MAKEFLAGS= cmake --build build/ffi-gpu --parallel $(JOBS)
	cmake --install build/ffi-gpu --prefix build/gpu
	JAX_BWGEMM_LIBRARY=build/gpu/$(LIBRARY) $(PYTHON) -m pytest tests/gpu -p no:benchmark \
	  $$($(PYTHON) -c 'import xdist' 2>/dev/null && echo --numprocesses=$(GPU_PROCESSES))
	JAX_BWGEMM_LIBRARY=build/gpu/$(LIBRARY) $(PYTHON) -m jax_bwgemm bench --json build/bench.json --commit '$(COMMIT)'
	$(if $(LONG),JAX_BWGEMM_LIBRARY=build/gpu/$(LIBRARY) $(PYTHON) -m jax_bwgemm bench --soak $(SOAK_MINUTES) \
	  --json build/soak.json --commit '$(COMMIT)')
	$(if $(LONG),JAX_BWGEMM_LIBRARY=build/gpu/$(LIBRARY) $(PYTHON) -m tests.gpu.sanitize --json build/sanitize.json)

clean:
	rm -rf build dist jax_bwgemm/_lib jax_bwgemm/_artifacts $(VENV)

# One pip at a time: each stamp waits for the one before.
$(VENV)/cmake.stamp:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make requires python 3.11+: PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	echo "$(CURDIR)" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/jax_bwgemm.pth"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'cmake>=3.20'
	touch $@

REQUIREMENTS = $(BIN)/python -c 'import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  print(*p["dependencies"], *(r for e in sys.argv[1:] for r in p["optional-dependencies"][e]), sep="\n")'
PIP_INSTALL = $(REQUIREMENTS) $(1) > $@.txt && \
  $(BIN)/python -m pip install --quiet --disable-pip-version-check -r $@.txt && touch $@

$(VENV)/build.stamp: pyproject.toml | $(VENV)/cmake.stamp
	$(call PIP_INSTALL,build)

$(VENV)/test.stamp: pyproject.toml | $(VENV)/build.stamp
	$(call PIP_INSTALL,test)

$(VENV)/lint.stamp: pyproject.toml | $(VENV)/test.stamp
	$(call PIP_INSTALL,lint)

$(VENV)/docs.stamp: pyproject.toml | $(VENV)/test.stamp
	$(call PIP_INSTALL,docs)

$(VENV)/cuda.stamp: pyproject.toml | $(VENV)/build.stamp
	$(call PIP_INSTALL,build cuda)

$(VENV)/wheel.stamp: pyproject.toml | $(VENV)/test.stamp
	$(call PIP_INSTALL,wheel)

$(VENV)/bench.stamp: pyproject.toml | $(VENV)/build.stamp
	$(call PIP_INSTALL,bench cuda)

$(LIBRARY): $(FFI_SOURCES) $(XLA_FFI_INCLUDE_DIR)/xla/ffi/api/ffi.h | $(VENV)/cmake.stamp
	$(BIN)/cmake -S ffi -B build/ffi -DXLA_FFI_INCLUDE_DIR="$(abspath $(XLA_FFI_INCLUDE_DIR))" \
	  -DJAX_BWGEMM_VERSION=$(VERSION)
	MAKEFLAGS= $(BIN)/cmake --build build/ffi --parallel $(JOBS)
	touch $@

UNPACK = import glob, sys, zipfile; z = zipfile.ZipFile(*glob.glob(sys.argv[1] + "/*.whl")); \
  z.extractall(sys.argv[1], [n for n in z.namelist() if n.startswith("jaxlib/include/xla/")])

$(HEADERS)/jaxlib/include/xla/ffi/api/ffi.h: | $(VENV)/cmake.stamp
	rm -rf $(HEADERS)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps -d $(HEADERS) jaxlib==$(JAXLIB_PIN)
	$(BIN)/python -c '$(UNPACK)' $(HEADERS)
	rm $(HEADERS)/*.whl
	touch $@
