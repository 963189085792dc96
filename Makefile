# make demo         a real document, a real model, full and compressed caches side by side
# make test         ruff, mypy, pytest; test-lowest: by the oldest packages; test-foreign: KerasHub's models
# make test-page    the server's page in Chromium; test-ray: a cluster of this machine; test-clients: others' clients
# make format       let ruff rewrite the files, and the lists of policies; lint: ruff and mypy alone
# make notebooks    run the notebooks and store their outputs, which tests compare with what runs
# make docs         the pages, into docs/_build/html
# make peer         jaxkv against transformers and kvpress, in an environment of their own
# make aot          compile kernels and programs for GPUs that are not there; aot-tpu: for TPUs; aot-quick, aot-tpu-quick: some
# make gpu          check and time kernels and models on this machine's GPU, with the Python on the path; goes on
# make clean        remove all environments and what tools left behind; downloaded models stay
# Other benchmarks are `.venv/bin/python -m benchmarks.NAME`. .venv is made from requirements.lock, if need be anew.

.DEFAULT_GOAL := help
SHELL := /bin/sh
PYTHON ?=
BIN := .venv/bin
PIP := -m pip install --quiet --disable-pip-version-check --no-input
PYTEST := -m pytest -q -n auto --dist loadfile
# A stamp's name holds a checksum, not a time: a fresh checkout gives files new times but the same content.
sum = $(shell echo "$(1)" | cat - $(2) | cksum | cut -d ' ' -f 1)
STAMP := .venv/.made-$(call sum,,requirements.lock pyproject.toml)
# Environments on top of .venv, which they see: what each has besides, as pip's arguments.
ON_TOP := aot aot-tpu clients docs foreign page ray
# It needs neither a GPU nor a driver to compile.
aot := --no-deps jax-cuda13-plugin==0.10.2 jax-cuda13-pjrt==0.10.2 nvidia-cuda-nvcc==13.0.88
# libtpu, which compiles for TPUs that are not there, is 690 MB.
aot-tpu := jax[tpu]==0.10.2
clients := anthropic==2.14.0 litellm==1.110.2 langchain-openai==1.7.4 pydantic-ai-slim[openai]==2.38.0 \
  instructor==1.17.0 llm==0.36 lm_eval[api]==0.4.13
npm_clients := openai@6.49.0 ai@6.0.326 @ai-sdk/openai-compatible@2.0.92 zod@4.6.7
docs := --no-deps -r docs/requirements.txt
# KerasHub runs without TensorFlow, which its package asks for: hence no dependencies but these.
foreign := --no-deps keras==3.15.1 keras-hub==0.32.0 kagglehub==1.0.3 kagglesdk==0.1.28 sentencepiece==0.2.3 \
  namex==0.1.0 h5py==3.16.0 optree==0.20.0
# They drive a browser that is there already: playwright downloads none.
page := --no-deps playwright==1.65.2 pyee==13.0.1 greenlet==3.5.6
ray := ray[data,serve]==2.60.0
stamp_of = .venv-$(1)/.made-$(call sum,$($(1)),$(if $(filter docs,$(1)),docs/requirements.txt))
PEER_STAMP := .venv-peer/.made-torch-2.13.0-kvpress-0.5.5
LOWEST_STAMP := .venv-lowest/.made-$(call sum,,pyproject.toml)
# What calls other packages: readers of files, tokenizers, Orbax, the hub, the decoder; and an export's programs.
LOWEST_TESTS := $(patsubst %,tests/test_%.py,layout packaging checkpoints gguf_metadata gguf_families weights text \
  templates fetching orbax saved_caches golden)

.PHONY: help demo environment environments test test-lowest test-foreign test-page test-ray test-clients lint format notebooks \
  peer aot aot-quick aot-tpu aot-tpu-quick gpu docs clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(STAMP)
	@$(BIN)/python -m benchmarks.demo

test: lint
	@$(BIN)/python $(PYTEST) --no-loadscope-reorder -m "not real"
	@$(BIN)/python $(PYTEST) --no-loadscope-reorder -m real
# Old packages warn of newer ones: there, what is deprecated is no error.
test-lowest: $(LOWEST_STAMP)
	@.venv-lowest/bin/python $(PYTEST) -m "not real" -W default::DeprecationWarning $(LOWEST_TESTS)
test-foreign: $(call stamp_of,foreign)
	@.venv-foreign/bin/python -m pytest -q tests/foreign
# Chromium must be installed: it is no Python package.
test-page: $(call stamp_of,page)
	@.venv-page/bin/python -m pytest -q -m "not real" tests/page/test_page.py
# Other packages warn of their own. npm must be installed.
test-clients: $(call stamp_of,clients)
	@npm install --silent --no-save --prefix .venv-clients/npm $(npm_clients)
	@.venv-clients/bin/python -m pytest -q -m "not real" -W default tests/clients/test_clients.py
# Ray warns of its own.
test-ray: $(call stamp_of,ray)
	@.venv-ray/bin/python -m pytest -q -m "not real" -W default tests/ray_cluster/test_ray.py

lint: $(STAMP)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: $(STAMP)
	@$(BIN)/python docs/make_lists.py
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

# One of them has a model of another library.
notebooks: $(STAMP) $(call stamp_of,foreign)
	@for each in notebooks/*.ipynb; do \
	  echo "$$each"; \
	  case $$each in *own_model*) python=.venv-foreign/bin/python;; *) python=$(BIN)/python;; esac; \
	  "$$python" notebooks/run.py "$$each" || exit 1; \
	done

# Warnings are errors. Pages are read anew each time: what they say of jaxkv is read from jaxkv.
docs: $(call stamp_of,docs)
	@$(BIN)/python docs/links.py
	@$(BIN)/python docs/pictures/make_pictures.py --check
	@.venv-docs/bin/python -m sphinx -W --keep-going -E -q -b html -d docs/_build/doctrees docs docs/_build/html

peer: $(STAMP) $(PEER_STAMP)
	@$(BIN)/python -m benchmarks.bench_peer

aot aot-quick: $(call stamp_of,aot)
	@.venv-aot/bin/python -m benchmarks.aot $(if $(filter %-quick,$@),--quick --device h100)
aot-tpu aot-tpu-quick: $(call stamp_of,aot-tpu)
	@.venv-aot-tpu/bin/python -m benchmarks.aot --device tpu $(if $(filter %-quick,$@),--quick)

gpu:
	@python3 -m benchmarks.gpu --out benchmarks/results --minutes 60
	@python3 -m benchmarks.gpu_report "$$(ls -t benchmarks/results/*.jsonl | head -n 1)"

clean:
	rm -rf .venv .venv-* docs/_build docs/notebooks docs/results build dist *.egg-info .pytest_cache .m*_cache .r*_cache .hypothesis
	find jaxkv checkpoints pallas_kernels tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

environment: $(STAMP)
environments: $(LOWEST_STAMP) $(foreach each,$(filter-out ray,$(ON_TOP)),$(call stamp_of,$(each)))

# Makes the environment $(1) with $(PYTHON) if given, else with the first Python on the path that is new enough.
define made
	for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; python=; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "error: jaxkv needs Python 3.11 or newer: install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; fi; \
	set -e; echo "== $(1): creating with $$("$$python" --version); a large download" >&2; \
	"$$python" -m venv $(1) || { \
	  echo "error: cannot make $(1); on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
endef

$(STAMP): requirements.lock pyproject.toml
	@$(call made,.venv); \
	rm -f .venv/.made-*; \
	$(BIN)/python $(PIP) -r requirements.lock; \
	$(BIN)/python $(PIP) --no-deps -e .; \
	touch $@

# torch first: its wheel decides which builds of the others fit.
$(PEER_STAMP):
	@$(call made,.venv-peer); \
	.venv-peer/bin/python $(PIP) $(TORCH_FLAGS) torch==2.13.0; \
	.venv-peer/bin/python $(PIP) kvpress==0.5.5 transformers==5.2.0 gguf safetensors; \
	touch $@

# Every `name>=version` of pyproject.toml as `name==version`; what these packages need in turn comes as pip chooses it.
$(LOWEST_STAMP): pyproject.toml
	@rm -rf .venv-lowest; $(call made,.venv-lowest); \
	sed -n 's/^  "\([A-Za-z0-9_-]*\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml > .venv-lowest/lowest.txt; \
	.venv-lowest/bin/python $(PIP) -c .venv-lowest/lowest.txt -e '.[test]'; \
	touch $@

site_packages = $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Seconds and a few packages instead of a second JAX; pip sees what .venv has, and installs what is missing.
define on_top
$(call stamp_of,$(1)): | $(STAMP)
	@set -e; echo "== .venv-$(1): creating, on top of .venv" >&2; \
	$(BIN)/python -m venv --clear .venv-$(1); \
	echo "$$(call site_packages,.venv)" > "$$(call site_packages,.venv-$(1))/venv.pth"; \
	.venv-$(1)/bin/python $(PIP) $($(1)); \
	.venv-$(1)/bin/python $(PIP) --no-deps -e .; \
	touch $$@
endef
$(foreach each,$(ON_TOP),$(eval $(call on_top,$(each))))
