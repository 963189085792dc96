# Everything runs in .venv, which is made from requirements.lock when it is missing or when the lock has changed.
#   make demo         a real document, a real model, full and compressed caches side by side
#   make test         ruff, mypy, pytest
#   make aot          compile the GPU kernels for GPUs that are not there
#   make help         all targets

.DEFAULT_GOAL := help
SHELL := /bin/sh
PYTHON ?=
BIN := .venv/bin
PEER := .venv-peer/bin
AOT := .venv-aot/bin
LATEST := .venv-latest/bin
LOWEST := .venv-lowest/bin
FOREIGN := .venv-foreign/bin
RAY := .venv-ray/bin
DOCS := .venv-docs/bin
PAGE := .venv-page/bin
PYTEST_FLAGS := -q -n auto --dist loadfile --no-loadscope-reorder
PIP_FLAGS := --quiet --disable-pip-version-check --no-input
# The stamp's name holds a checksum, not a time: a fresh checkout gives files new times but the same content.
STAMP := .venv/.made-$(shell cat requirements.lock pyproject.toml | cksum | cut -d ' ' -f 1)
PEER_PACKAGES := kvpress==0.5.5 transformers==5.2.0 gguf safetensors
PEER_STAMP := .venv-peer/.made-torch-2.13.0-kvpress-0.5.5
# The CUDA plugin must not sit in .venv; it needs neither a GPU nor a driver to compile.
AOT_TOOLS := nvidia-cuda-nvcc==13.0.* nvidia-cuda-nvdisasm==13.2.*
AOT_PACKAGES := jax-cuda13-plugin==0.10.2 jax-cuda13-pjrt==0.10.2 $(AOT_TOOLS)
AOT_STAMP := .venv-aot/.made-0.10.2-nvdisasm
AOT_VERSIONS := 0.11 0.12
# libtpu, which compiles for TPUs that are not there, is 690 MB: an environment of its own.
AOT_TPU_STAMP := .venv-aot-tpu/.made-0.10.2
AOT_TPU_VERSIONS := 0.12
LATEST_STAMP := .venv-latest/.made-0.12
LOWEST_STAMP := .venv-lowest/.made-$(shell cksum < pyproject.toml | cut -d ' ' -f 1)
# KerasHub runs without TensorFlow, which its package asks for: hence no dependencies but these.
FOREIGN_PACKAGES := keras==3.15.1 keras-hub==0.32.0 kagglehub==1.0.3 kagglesdk==0.1.28 sentencepiece==0.2.3 \
  namex==0.1.0 h5py==3.16.0 optree==0.20.0
FOREIGN_STAMP := .venv-foreign/.made-keras-hub-0.32.0
# They drive a browser that is there already: playwright downloads none.
PAGE_PACKAGES := playwright==1.65.2 pyee==13.0.1 greenlet==3.5.6
PAGE_STAMP := .venv-page/.made-playwright-1.65.2
RAY_STAMP := .venv-ray/.made-ray-data-2.60.0
DOCS_STAMP := .venv-docs/.made-$(shell cksum < docs/requirements.txt | cut -d ' ' -f 1)
LATEST_TESTS := tests/test_kernels.py tests/test_kernels_decode.py tests/test_kernels_prefill.py \
  tests/test_kernels_step.py tests/test_kernels_linear.py tests/test_implementations.py tests/test_layout.py
GPU_TESTS := tests/test_kernels.py tests/test_kernels_decode.py tests/test_kernels_prefill.py \
  tests/test_kernels_step.py tests/test_kernels_linear.py tests/test_implementations.py
# What calls other packages: readers of files, tokenizers, Orbax, the hub, the decoder; and an export's programs.
LOWEST_TESTS := tests/test_layout.py tests/test_packaging.py tests/test_checkpoints.py tests/test_gguf_metadata.py \
  tests/test_gguf_families.py \
  tests/test_weights.py tests/test_text.py tests/test_templates.py tests/test_fetching.py tests/test_orbax.py \
  tests/test_saved_caches.py tests/test_golden.py

.PHONY: help demo environment environments test test-gpu test-latest test-lowest test-foreign test-page test-ray lint format notebooks bench bench-peer qa-peer bench-gpu bench-tpu against long-answer soak \
  sharded-soak slots-table engine-table engine-soak serving decode-step throughput omnikv recall tune aot aot-quick aot-tpu aot-tpu-quick aot-sharded aot-slots plan-cells \
  plan-memory plan-requests needle train-tiny orders-tiny needle-tiny clean \
  docs docs-links $(AOT_VERSIONS:%=aot-%) $(AOT_TPU_VERSIONS:%=aot-tpu-%)

help:
	@echo "make demo         a real document, a real model, full and compressed caches side by side"
	@echo "make test         ruff, mypy, pytest"
	@echo "make lint         ruff and mypy alone"
	@echo "make format       let ruff rewrite the files, and the lists of policies"
	@echo "make notebooks    run the notebooks and store their outputs, which tests compare with what runs"
	@echo "make bench        time jaxkv on this machine"
	@echo "make bench-peer   time jaxkv against transformers and kvpress, in an environment of their own (.venv-peer)"
	@echo "make qa-peer      questions on 20 documents beside kvpress' pipeline: kept rows and answers"
	@echo "make bench-gpu    check and time kernels and models on this machine's GPU, with the Python on the path; goes on"
	@echo "make bench-tpu    the same on one device of a TPU, beside the estimates that there are"
	@echo "make test-gpu     the kernels' tests, compiled for this machine's GPU, with the Python on the path"
	@echo "make against      time this checkout against another one: make against BASE=../other-checkout"
	@echo "make long-answer  2,000 new tokens: what is compiled when, and speed with compilation and without"
	@echo "make soak         300 random calls in one process: no hang, the results of fresh processes, steady memory"
	@echo "make sharded-soak 100 sharded generations on 8 fake devices, and test_hosts ten times, beside 8 busy processes: no abort"
	@echo "make slots-table  24 requests over 4 slots under every row of the policy table: a device, 16 bits, a mesh of 8"
	@echo "make engine-table 200 requests to an engine of 8 slots under every row of the policy table"
	@echo "make engine-soak  half an hour of random requests to an engine: memory, slots, queue"
	@echo "make serving      32 requests at once: the engine beside generate one by one and transformers' continuous batching"
	@echo "make decode-step  what eviction and merging cost a decode step, on this machine"
	@echo "make throughput   D2O's table 5 at this machine's scale: whole generations at equal bytes"
	@echo "make omnikv       OmniKV's decode step against full attention's, on this machine"
	@echo "make recall       attention in documents: what policies recall and lose of it at equal totals, on this machine"
	@echo "make tune         search for the fastest tiles on this machine's GPU, 8 minutes, and ship them"
	@echo "make aot          compile every kernel for H100, H200 and A100, read what ptxas says, model times; aot-quick: one each"
	@echo "make aot-tpu      kernels and an 8B model's programs compiled by libtpu for TPUs that are not there; a model of times; -quick: some"
	@echo "make aot-tpu-0.12 the same by JAX 0.12, under Python 3.12"
	@echo "make aot-0.11     the same kernels by JAX 0.11, under Python 3.12; aot-0.12 by JAX 0.12"
	@echo "make aot-slots    an engine's loop of 256 slots, 8B on an H200 and 70B on 8 H100s, beside that of one batch"
	@echo "make aot-sharded  70B on 8 GPUs and 405B on 16: what each holds, and what travels, as compiled"
	@echo "make plan-cells   a plan's arithmetic beside what the compiler says, for GPUs that are not there"
	@echo "make plan-memory  the most memory of a process here, predicted and measured"
	@echo "make plan-requests requests an hour here, predicted and measured, for three policies"
	@echo "make test-latest  test the kernels with the newest JAX, under Python 3.12"
	@echo "make test-lowest  test readers, tokenizers and decoders with the oldest packages that pyproject.toml allows"
	@echo "make test-foreign KerasHub's Llama and Gemma 3 over jaxkv.compress, append and attend, in an environment of its own"
	@echo "make test-page    the page of jaxkv serve in a headless Chromium, driven from an environment of its own"
	@echo "make test-ray     jaxkv.serving.ray and jaxkv batch --ray on a cluster of this machine, in an environment of its own"
	@echo "make docs         these pages, into docs/_build/html, and every internal link followed; docs-links: those outside, too"
	@echo "make train-tiny   train the tiny model that comes with jaxkv, an hour; what was ended goes on with the same command"
	@echo "make orders-tiny  orders between policies on it, with intervals; goes on likewise"
	@echo "make needle-tiny  a hundred needles of the tiny model, the question unseen, with intervals; goes on likewise"
	@echo "make needle       kvpress' ten needles in 1,024 tokens, its figures beside ours; and with the question unseen"
	@echo "make clean        remove both environments and what tools left behind; downloaded models stay"

demo: $(STAMP)
	@$(BIN)/python benchmarks/demo.py

test: lint
	@echo "== pytest"
	@$(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not real"
	@echo "== pytest: the real model"
	@$(BIN)/python -m pytest $(PYTEST_FLAGS) -m real

environment: $(STAMP)

environments: $(LOWEST_STAMP) $(FOREIGN_STAMP) $(DOCS_STAMP) $(PAGE_STAMP) $(AOT_STAMP) $(AOT_TPU_STAMP)

lint: $(STAMP)
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "== mypy"
	@$(BIN)/mypy

format: $(STAMP)
	@$(BIN)/python docs/make_lists.py
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# One of them has a model of another library.
notebooks: $(STAMP) $(FOREIGN_STAMP)
	@for each in notebooks/*.ipynb; do \
	  echo "$$each"; \
	  case $$each in *own_model*) python=$(FOREIGN)/python;; *) python=$(BIN)/python;; esac; \
	  "$$python" notebooks/run.py "$$each" || exit 1; \
	done

bench: $(STAMP)
	@$(BIN)/python benchmarks/cpu.py

bench-peer: $(STAMP) $(PEER_STAMP)
	@$(BIN)/python benchmarks/bench_peer.py --peer-python $(PEER)/python \
	  --gguf "$$($(BIN)/python -c "from jaxkv.checkpoints import fetch; print(fetch('smollm2-135m-instruct'))")"

qa-peer: $(STAMP) $(PEER_STAMP)
	@$(BIN)/python -m benchmarks.qa_peer --peer-python $(PEER)/python

test-gpu:
	@XLA_PYTHON_CLIENT_PREALLOCATE=false python3 -m pytest -q --gpu -n auto $(GPU_TESTS)

bench-gpu:
	@python3 -m benchmarks.gpu --out benchmarks/results --minutes 60
	@python3 -m benchmarks.gpu_report "$$(ls -t benchmarks/results/*.jsonl | head -n 1)"

bench-tpu:
	@python3 -m benchmarks.tpu --out benchmarks/results --minutes 60
	@python3 -m benchmarks.tpu_report "$$(ls -t benchmarks/results/tpu*.jsonl | head -n 1)"

against: $(STAMP)
	@$(BIN)/python benchmarks/against.py --base "$(BASE)"

long-answer: $(STAMP)
	@$(BIN)/python -m benchmarks.long_answer

soak: $(STAMP)
	@$(BIN)/python -m benchmarks.soak

sharded-soak: $(STAMP)
	@$(BIN)/python -m benchmarks.sharded_soak

slots-table: $(STAMP)
	@PYTHONPATH=. $(BIN)/python tests/slot_runs.py device
	@PYTHONPATH=. $(BIN)/python tests/slot_runs.py bfloat16
	@PYTHONPATH=. NPROC=24 XLA_FLAGS=--xla_force_host_platform_device_count=8 $(BIN)/python tests/slot_runs.py mesh

engine-table: $(STAMP)
	@PYTHONPATH=. $(BIN)/python tests/engine_runs.py

engine-soak: $(STAMP)
	@PYTHONPATH=. $(BIN)/python tests/engine_soak.py

serving: $(STAMP) $(PEER_STAMP)
	@$(BIN)/python -m benchmarks.serving --peer $(PEER)/python

decode-step: $(STAMP)
	@$(BIN)/python -m benchmarks.decode_step

throughput: $(STAMP)
	@$(BIN)/python -m benchmarks.throughput

omnikv: $(STAMP)
	@$(BIN)/python -m benchmarks.omnikv

recall: $(STAMP)
	@$(BIN)/python -m benchmarks.recall

tune:
	@python3 -m benchmarks.tune --out benchmarks/results
	@mkdir -p pallas_kernels/tuned && mv benchmarks/results/tuned/*.json pallas_kernels/tuned/

aot: $(AOT_STAMP)
	@$(AOT)/python benchmarks/aot.py --out benchmarks/results/aot.md
	@$(AOT)/python benchmarks/aot_offload.py --out benchmarks/results/aot_offload.md
	@$(AOT)/python benchmarks/aot_sharded.py
	@$(AOT)/python benchmarks/aot_export.py
	@$(AOT)/python benchmarks/perf_model.py --out benchmarks/results/gpu_model.md

aot-tpu-quick: $(AOT_TPU_STAMP)
	@PYTHONPATH=. .venv-aot-tpu/bin/python benchmarks/aot_tpu.py --quick

aot-tpu: $(AOT_TPU_STAMP)
	@PYTHONPATH=. .venv-aot-tpu/bin/python benchmarks/aot_tpu.py --out benchmarks/results/tpu_model.md

# The same by a newer JAX and its libtpu, in environments of their own.
$(AOT_TPU_VERSIONS:%=aot-tpu-%): aot-tpu-%:
	@$(find_312); \
	if [ -n "$$python" ]; then \
	  $(MAKE) --no-print-directory .venv-aot-tpu-$*/.made PYTHON="$$python" && \
	  PYTHONPATH=. .venv-aot-tpu-$*/bin/python benchmarks/aot_tpu.py --out benchmarks/results/tpu_model_$*.md; \
	else \
	  echo "skipped: aot-tpu-$* needs Python 3.12; there is none on the path or in pyenv"; \
	fi

aot-slots: $(AOT_STAMP)
	@$(AOT)/python benchmarks/aot_slots.py

aot-sharded: $(AOT_STAMP)
	@$(AOT)/python benchmarks/aot_sharded.py

plan-cells: $(AOT_STAMP)
	@$(AOT)/python -m benchmarks.plan_cells

plan-memory: $(STAMP)
	@$(BIN)/python -m benchmarks.plan_memory

plan-requests: $(STAMP)
	@$(BIN)/python -m benchmarks.plan_requests

aot-quick: $(AOT_STAMP)
	@$(AOT)/python benchmarks/aot.py --quick
	@$(AOT)/python benchmarks/aot_sharded.py --quick
	@$(AOT)/python benchmarks/aot_export.py D2O
	@$(AOT)/python benchmarks/perf_model.py --quick
	@$(AOT)/python -m benchmarks.plan_cells --quick

# Newer JAX, in environments of its own: every kernel, decode attention in the model, a sharded loop.
$(AOT_VERSIONS:%=aot-%): aot-%:
	@$(find_312); \
	if [ -n "$$python" ]; then \
	  $(MAKE) --no-print-directory .venv-aot-$*/.made PYTHON="$$python" && \
	  .venv-aot-$*/bin/python benchmarks/aot.py && \
	  .venv-aot-$*/bin/python benchmarks/perf_model.py --decode && \
	  .venv-aot-$*/bin/python benchmarks/aot_sharded.py --quick; \
	else \
	  echo "skipped: aot-$* needs Python 3.12; there is none on the path or in pyenv"; \
	fi

train-tiny: $(STAMP)
	@$(BIN)/python -m benchmarks.train_tiny build/train_tiny

orders-tiny: $(STAMP)
	@$(BIN)/python -m benchmarks.orders_tiny

needle-tiny: $(STAMP)
	@$(BIN)/python -m benchmarks.needle_tiny

needle: $(STAMP)
	@$(BIN)/python -m benchmarks.needle

clean:
	rm -rf .venv .venv-peer .venv-aot .venv-aot-tpu $(AOT_VERSIONS:%=.venv-aot-%) $(AOT_TPU_VERSIONS:%=.venv-aot-tpu-%) .venv-latest .venv-lowest .venv-foreign .venv-page .venv-ray .venv-docs docs/_build docs/notebooks docs/results build dist jaxkv.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find jaxkv checkpoints tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

test-foreign: $(FOREIGN_STAMP)
	@$(FOREIGN)/python -m pytest -q tests/foreign

# Chromium must be installed: it is no Python package.
test-page: $(PAGE_STAMP)
	@$(PAGE)/python -m pytest -q -m "not real" tests/page/test_page.py

# Ray warns of its own.
test-ray: $(RAY_STAMP)
	@$(RAY)/python -m pytest -q -m "not real" -W default tests/ray_cluster/test_ray.py

# Warnings are errors. Pages are read anew each time: what they say of jaxkv is read from jaxkv.
docs: $(DOCS_STAMP)
	@$(BIN)/python docs/links.py
	@$(BIN)/python docs/pictures/make_pictures.py --check
	@$(DOCS)/python -m sphinx -W --keep-going -E -q -b html -d docs/_build/doctrees docs docs/_build/html
	@echo "docs/_build/html/index.html"

docs-links: $(STAMP)
	@$(BIN)/python docs/links.py --outside

# $(PYTHON) if given, else the first Python on the path that is new enough.
define find_python
	new='import sys; sys.exit(sys.version_info < (3, 11))'; \
	for python in $(if $(PYTHON),$(PYTHON),python3 python3.13 python3.12 python3.11 python); do \
	  if "$$python" -c "$$new" 2>/dev/null; then break; fi; python=; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "error: jaxkv needs Python 3.11 or newer and found none; install one, or name it: make PYTHON=/path/to/python3" >&2; \
	  exit 1; \
	fi
endef

$(STAMP): requirements.lock pyproject.toml
	@$(find_python); \
	set -e; \
	echo "== .venv: creating with $$("$$python" --version)" >&2; \
	"$$python" -m venv .venv || { \
	  echo "error: cannot make .venv; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	echo "== .venv: installing $$(grep -c == requirements.lock) pinned packages, about 300 MB to download" >&2; \
	$(BIN)/python -m pip install $(PIP_FLAGS) -r requirements.lock; \
	echo "== .venv: installing jaxkv" >&2; \
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps -e .; \
	rm -f .venv/.made-*; \
	touch $@

# torch first: its wheel decides which builds of the others fit.
$(PEER_STAMP):
	@$(find_python); \
	set -e; \
	echo "== .venv-peer: creating; torch and what it needs are a large download" >&2; \
	"$$python" -m venv .venv-peer; \
	$(PEER)/python -m pip install $(PIP_FLAGS) $(TORCH_FLAGS) torch==2.13.0; \
	echo "== .venv-peer: installing $(PEER_PACKAGES)" >&2; \
	$(PEER)/python -m pip install $(PIP_FLAGS) $(PEER_PACKAGES); \
	touch $@

$(AOT_STAMP): requirements.lock
	@$(find_python); \
	set -e; \
	echo "== .venv-aot: creating; a second JAX, and its CUDA plugin" >&2; \
	"$$python" -m venv .venv-aot; \
	$(AOT)/python -m pip install $(PIP_FLAGS) -r requirements.lock; \
	$(AOT)/python -m pip install $(PIP_FLAGS) --no-deps $(AOT_PACKAGES); \
	$(AOT)/python -m pip install $(PIP_FLAGS) --no-deps -e .; \
	touch $@

$(AOT_TPU_STAMP): requirements.lock
	@$(find_python); \
	set -e; \
	echo "== .venv-aot-tpu: creating; a second JAX, and libtpu" >&2; \
	"$$python" -m venv .venv-aot-tpu; \
	.venv-aot-tpu/bin/python -m pip install $(PIP_FLAGS) -r requirements.lock; \
	.venv-aot-tpu/bin/python -m pip install $(PIP_FLAGS) 'jax[tpu]==0.10.2'; \
	.venv-aot-tpu/bin/python -m pip install $(PIP_FLAGS) --no-deps -e .; \
	touch $@

# The plugin's version is that of the jaxlib that pip chose.
.venv-aot-%/.made: pyproject.toml
	@set -e; \
	echo "== .venv-aot-$*: creating with $$("$(PYTHON)" --version)" >&2; \
	"$(PYTHON)" -m venv .venv-aot-$*; \
	.venv-aot-$*/bin/python -m pip install $(PIP_FLAGS) 'jax==$*.*' -e .; \
	version=$$(.venv-aot-$*/bin/python -c 'import jaxlib; print(jaxlib.__version__)'); \
	.venv-aot-$*/bin/python -m pip install $(PIP_FLAGS) --no-deps \
	  jax-cuda13-plugin=="$$version" jax-cuda13-pjrt=="$$version" $(AOT_TOOLS); \
	touch $@

.venv-aot-tpu-%/.made: pyproject.toml
	@set -e; \
	echo "== .venv-aot-tpu-$*: creating with $$("$(PYTHON)" --version), and libtpu" >&2; \
	"$(PYTHON)" -m venv .venv-aot-tpu-$*; \
	.venv-aot-tpu-$*/bin/python -m pip install $(PIP_FLAGS) 'jax[tpu]==$*.*' -e .; \
	touch $@

# A few packages on top of .venv, which it sees: seconds and 70 MB instead of a second JAX.
define site_packages
$$($(1)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
endef

$(FOREIGN_STAMP): | $(STAMP)
	@set -e; \
	echo "== .venv-foreign: creating, on top of .venv" >&2; \
	rm -rf .venv-foreign; \
	$(BIN)/python -m venv .venv-foreign; \
	echo "$(call site_packages,$(BIN))" > "$(call site_packages,$(FOREIGN))/venv.pth"; \
	$(FOREIGN)/python -m pip install $(PIP_FLAGS) --no-deps $(FOREIGN_PACKAGES); \
	$(FOREIGN)/python -m pip install $(PIP_FLAGS) --no-deps -e .; \
	touch $@

$(PAGE_STAMP): | $(STAMP)
	@set -e; \
	echo "== .venv-page: creating, on top of .venv" >&2; \
	rm -rf .venv-page; \
	$(BIN)/python -m venv .venv-page; \
	echo "$(call site_packages,$(BIN))" > "$(call site_packages,$(PAGE))/venv.pth"; \
	$(PAGE)/python -m pip install $(PIP_FLAGS) --no-deps $(PAGE_PACKAGES); \
	$(PAGE)/python -m pip install $(PIP_FLAGS) --no-deps -e .; \
	touch $@

# pip sees what .venv has, and installs what is missing.
$(RAY_STAMP): | $(STAMP)
	@set -e; \
	echo "== .venv-ray: creating, on top of .venv; Ray and what it needs take 400 MB" >&2; \
	rm -rf .venv-ray; \
	$(BIN)/python -m venv .venv-ray; \
	echo "$(call site_packages,$(BIN))" > "$(call site_packages,$(RAY))/venv.pth"; \
	$(RAY)/python -m pip install $(PIP_FLAGS) 'ray[data,serve]==2.60.0'; \
	$(RAY)/python -m pip install $(PIP_FLAGS) --no-deps -e .; \
	touch $@

$(DOCS_STAMP): | $(STAMP)
	@set -e; \
	echo "== .venv-docs: creating, on top of .venv" >&2; \
	rm -rf .venv-docs; \
	$(BIN)/python -m venv .venv-docs; \
	echo "$(call site_packages,$(BIN))" > "$(call site_packages,$(DOCS))/venv.pth"; \
	$(DOCS)/python -m pip install $(PIP_FLAGS) --no-deps -r docs/requirements.txt; \
	touch $@

# The first Python 3.12 that there is, or nothing.
define find_312
	for python in python3.12 "$$HOME"/.pyenv/versions/3.12.*/bin/python3.12; do \
	  if "$$python" -c '' 2>/dev/null; then break; fi; python=; \
	done
endef

# JAX 0.12 needs Python 3.12.
test-latest:
	@$(find_312); \
	if [ -n "$$python" ]; then \
	  $(MAKE) --no-print-directory $(LATEST_STAMP) PYTHON="$$python" && \
	  $(LATEST)/python -m pytest -q -n auto $(LATEST_TESTS); \
	else \
	  echo "skipped: test-latest needs Python 3.12, as JAX 0.12 does; there is none on the path or in pyenv"; \
	fi

$(LATEST_STAMP): pyproject.toml
	@set -e; \
	echo "== .venv-latest: creating with $$("$(PYTHON)" --version)" >&2; \
	"$(PYTHON)" -m venv .venv-latest; \
	$(LATEST)/python -m pip install $(PIP_FLAGS) 'jax>=0.12,<0.13' -e '.[test]'; \
	touch $@

# Old packages warn of newer ones: there, what is deprecated is no error.
# pytest-xdist 3.6 has fewer options than PYTEST_FLAGS takes.
test-lowest: $(LOWEST_STAMP)
	@$(LOWEST)/python -m pytest -q -n auto --dist loadfile -m "not real" -W default::DeprecationWarning $(LOWEST_TESTS)

# Every `name>=version` of pyproject.toml as `name==version`; what these packages need in turn comes as pip chooses it.
$(LOWEST_STAMP): pyproject.toml
	@$(find_python); \
	set -e; \
	echo "== .venv-lowest: creating; the oldest packages that pyproject.toml allows" >&2; \
	rm -rf .venv-lowest; \
	"$$python" -m venv .venv-lowest; \
	sed -n 's/^  "\([A-Za-z0-9_-]*\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml > .venv-lowest/lowest.txt; \
	$(LOWEST)/python -m pip install $(PIP_FLAGS) -c .venv-lowest/lowest.txt -e '.[test]'; \
	touch $@
