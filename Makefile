# Two commands are the whole set-up: `make demo` and `make test`. Python 3.11+, a C++20 compiler and make.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
PY := $(VENV)/bin/python
ORACLES := .venv-oracles
NATIVE := $(shell find native -type f)

.PHONY: build model demo test test-oracles test-lossless lint format bench sanitize clean

build: $(VENV)/.built

$(VENV)/.dependencies: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Paceline needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade "pip>=25.1"
	$(PY) -m pip install --quiet --group dev
	@touch $@

$(VENV)/.built: $(VENV)/.dependencies $(NATIVE)
	$(PY) -m pip install --quiet --no-build-isolation --editable .
	@touch $@

model: build
	$(PY) -m paceline pull smollm2

demo: model
	$(PY) -m paceline demo

test: lint model
	$(PY) -m pytest

# torch and the peers it compares with live outside the development environment, in one that lies on top of it
# and sees what it holds. llama.cpp takes ten minutes to compile: ORACLE_LLAMA names a folder with its programs,
# LLAMA=no leaves out the tests that need it.
LLAMA ?= yes
LLAMA_GROUP := $(if $(filter yes,$(LLAMA)),$(if $(ORACLE_LLAMA),,--group oracle-llama))
$(ORACLES)/.ready-$(LLAMA): $(VENV)/.built
	$(PYTHON) -m venv --without-pip $(ORACLES)
	base=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	own=$$($(ORACLES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "import site; site.addsitedir('$$base')" > $$own/base.pth
	$(ORACLES)/bin/python -m pip install --quiet --group oracle $(LLAMA_GROUP)
	$(ORACLES)/bin/python -m pip install --quiet --no-deps --group oracle-heads
	@touch $@

test-oracles: $(ORACLES)/.ready-$(LLAMA) model
	$(ORACLES)/bin/python -m pytest -m oracle $(if $(filter yes,$(LLAMA)),,-k "not llama_cpp")

# ten times the random cases against plain decoding that `test` runs
test-lossless: build
	PACELINE_CASES=10 $(PY) -m pytest --timeout 0 tests/engine/test_lossless_heads.py

lint: build
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: build
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: model
	$(PY) -m paceline bench smollm2 --prompts benchmarks/prompts.jsonl --max-tokens 128

sanitize: $(VENV)/.dependencies
	for kind in address,undefined thread; do \
		$(VENV)/bin/cmake -S native -B build/sanitize-$$kind -G Ninja -DPACELINE_SANITIZE=$$kind \
			-DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja && \
		$(VENV)/bin/cmake --build build/sanitize-$$kind && \
		$(VENV)/bin/ctest --test-dir build/sanitize-$$kind --output-on-failure || exit 1; \
	done

clean:
	rm -rf build dist $(VENV) $(ORACLES) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src -name '*.so' -delete
