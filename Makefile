# Every verb sets up what it needs, prints the seconds of each step, and shows a log only when a step fails.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup tools lock base-images sbom image-sbom scan release-check release-notes chart krew demo demo-engines demo-fleet demo-down test test-all check generate verify cluster cluster-down images e2e e2e-all e2e-nodes e2e-keda e2e-flux e2e-policies bench

VENV := .venv
TOOLS := build/tools
SBOM_IMAGES := operator engine-cpu engine-simulated
PYTHON := $(VENV)/bin/python
STAGE := .ci/stage
API_BINARIES := kube-apiserver etcd kubectl helm
# One more than there are cores: some tests wait for what others do.
TEST_PROCESSES := $(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 4)))
# The order of the files is that of tests/conftest.py.
TEST_ALL := $(PYTHON) -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations=40 tests
GENERATED := engine-image/contract.json engine-image/launcher/vllm.py engine-image/launcher/redaction.py engine-image/launcher/form_data.py engine-image/launcher/desired_adapters.py engine-image/launcher/prompts.py engine-image/launcher/self_benchmark.py crds charts/plimsoll/files docs/reference docs/evaluation
CACHE := $(or $(PLIMSOLL_CACHE),$(HOME)/.cache/plimsoll)
export PATH := $(CURDIR)/$(VENV)/bin:$(CACHE)/cluster/bin:$(PATH)

help: ## Show these verbs
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.done ## Python environment in .venv, from the lock files

$(VENV)/.done: pyproject.toml requirements/dev.txt
	@python3 -c 'import ensurepip' 2>/dev/null || { echo 'Python has no venv module here: apt-get install python3-venv'; exit 1; }
	@$(STAGE) setup bash -c 'python3 -m venv $(VENV) && $(PYTHON) -m pip install -q --no-deps --no-compile --require-hashes -r requirements/dev.txt && $(PYTHON) -m pip install -q --no-deps --no-build-isolation -e .'
	@touch $@

$(VENV)/.clients: $(VENV)/.done requirements/clients.txt
	@$(STAGE) clients $(PYTHON) -m pip install -q --no-deps --no-compile --require-hashes -r requirements/clients.txt
	@touch $@

tools: $(TOOLS)/.done ## Python environment in build/tools of what locks, scans and SBOMs need, from the lock file

$(TOOLS)/.done: requirements/tools.txt
	@$(STAGE) tools bash -c 'python3 -m venv $(TOOLS) && $(TOOLS)/bin/pip install -q --no-deps --no-compile --require-hashes -r requirements/tools.txt'
	@touch $@

lock: tools ## Pin the dependencies again, with the hash of each file (requirements/*.txt, engine-image/*.lock)
	@$(STAGE) lock requirements/lock

base-images: ## Look up the digests of the base images again (release/base-images.env)
	@$(STAGE) -v base-images python3 -m release.base_images resolve

sbom: images tools ## An SBOM (CycloneDX) of each image that make images built, in build/sbom
	@$(STAGE) -v sbom bash -c 'mkdir -p build/sbom && for name in $(SBOM_IMAGES); do \
	  $(TOOLS)/bin/python -m release.sbom $$name localhost:5001/plimsoll/$$name:dev build/sbom/$$name.cdx.json || exit 1; done'

scan: tools ## Known vulnerabilities of all locked Python packages; needs api.osv.dev
	@$(STAGE) -v scan $(TOOLS)/bin/python -m release.scan

image-sbom: tools ## What a release does: the SBOM of the image IMAGE, called NAME, in FILE
	@$(STAGE) -v image-sbom $(TOOLS)/bin/python -m release.sbom "$(NAME)" "$(IMAGE)" "$(FILE)"

release-check: ## What a release does: fail unless package, chart and changelog have VERSION, and base images digests
	@$(STAGE) -v release-check release/check "$(VERSION)"

release-notes: ## What a release does: the section of VERSION in the changelog, in FILE
	@$(STAGE) -v release-notes release/notes "$(VERSION)" "$(FILE)"

chart: ## What a release does: package the chart in dist, with the images VERSION in REPOSITORY as its defaults
	@$(STAGE) -v chart release/chart "$(VERSION)" "$(REPOSITORY)"

krew: ## What a release does: the krew plugin of VERSION in dist, for a release whose files are at URL
	@$(STAGE) -v krew python3 -m release.krew "$(VERSION)" "$(URL)" dist

# The tests start hundreds of Python programs, each of which would compile the same files again.
test test-all: export PYTHONDONTWRITEBYTECODE :=
test test-all: export PYTHONPYCACHEPREFIX := $(CURDIR)/build/bytecode
# Go programs that live for a second collect less garbage.
test test-all: export GOGC := 400
test: setup $(VENV)/.clients ## Unit tests, and tests on a real API server, a real Envoy and real SDKs
	@$(STAGE) -v binaries e2e/cluster/binaries $(API_BINARIES)
	@$(STAGE) -v test $(TEST_ALL) -m "not extended"

test-all: setup $(VENV)/.clients ## These tests with all variants of those that take minutes
	@$(STAGE) -v binaries e2e/cluster/binaries $(API_BINARIES)
	@$(STAGE) -v test $(TEST_ALL)

check: setup $(VENV)/.clients ## Linter, formatter, types, layers
	@$(STAGE) lint ruff check .
	@$(STAGE) format ruff format --check .
	@$(STAGE) types bash -c 'mypy && mypy -p e2e.cluster && mypy -p release && MYPYPATH=engine-image mypy --strict --explicit-package-bases -p launcher -p simulated'
	@$(STAGE) layers lint-imports

generate: setup ## Make again what is generated: CRDs, reference pages, the scoreboard's results
	@$(STAGE) contract cp operator/plimsoll/api/contract.json engine-image/contract.json
	@$(STAGE) engines cp $(addprefix operator/plimsoll/engines/,vllm.py redaction.py form_data.py desired_adapters.py prompts.py self_benchmark.py) engine-image/launcher
	@$(STAGE) crd $(PYTHON) -m plimsoll.api.crd
	@$(STAGE) json-schema $(PYTHON) crds/json_schema.py
	@$(STAGE) values $(PYTHON) charts/docs.py
	@$(STAGE) docs $(PYTHON) docs/generate.py
	@$(STAGE) scoreboard $(PYTHON) -m bench scoreboard --page
	@$(STAGE) reference $(PYTHON) -m plimsoll.api.reference_page

verify: generate ## Fail when something generated was out of date
	@git diff --exit-code --stat -- $(GENERATED) && test -z "$$(git ls-files --others --exclude-standard -- $(GENERATED))" \
	  || { echo 'generated files differ: run make generate and commit them'; exit 1; }

cluster: ## A local Kubernetes cluster with a registry (kubeconfig: build/kubeconfig)
	@$(STAGE) -v cluster e2e/cluster/up

cluster-down: ## Remove cluster and registry; caches stay
	@$(STAGE) -v cluster-down e2e/cluster/down

images: cluster ## Build the project's images and push them to the local registry
	@$(STAGE) -v images e2e/cluster/images

demo: setup images ## From nothing to a served model, and real traces on real vLLM and on a fleet that scales
	@$(STAGE) -v demo $(PYTHON) -m e2e.demo

demo-engines: setup images ## Only the run on real vLLM: two to three minutes
	@$(STAGE) -v demo-engines $(PYTHON) -m e2e.demo --only engines

demo-fleet: setup images ## Only the run on a fleet of engine simulators: ten minutes
	@$(STAGE) -v demo-fleet $(PYTHON) -m e2e.demo --only fleet

demo-down: cluster-down ## Remove what the demo made

e2e: images $(VENV)/.clients ## Scenarios on the cluster, those that a change can affect most
	@$(STAGE) -v cuda-lines python3 -m e2e.cluster cuda-lines
	@$(STAGE) -v e2e $(PYTHON) -m pytest --durations=30 --maxfail=3 --quiet-seconds=60 e2e -m "cluster and not extended"

e2e-all: images $(VENV)/.clients ## All scenarios on the cluster
	@$(STAGE) -v cuda-lines python3 -m e2e.cluster cuda-lines
	@$(STAGE) -v e2e $(PYTHON) -m pytest --durations=40 e2e -m cluster

e2e-nodes: export PLIMSOLL_WORKERS := 3
e2e-nodes: images $(VENV)/.clients ## The scenarios that need several nodes, on a cluster of their own
	@$(STAGE) -v e2e-nodes $(PYTHON) -m pytest e2e -m nodes
	@$(STAGE) -v cluster-down e2e/cluster/down

e2e-keda: images $(VENV)/.clients ## The scenarios with KEDA and the Prometheus adapter, which are built first
	@$(STAGE) -v keda e2e/cluster/images keda prometheus-adapter
	@$(STAGE) -v e2e-keda $(PYTHON) -m pytest e2e -m keda

e2e-flux: images $(VENV)/.clients ## The scenario with Flux, which is built first
	@$(STAGE) -v flux e2e/cluster/images flux
	@$(STAGE) -v e2e-flux $(PYTHON) -m pytest e2e -m flux

e2e-policies: images $(VENV)/.clients ## The scenario with enforced NetworkPolicies, whose controller is built first
	@$(STAGE) -v policies e2e/cluster/images policies
	@$(STAGE) -v e2e-policies $(PYTHON) -m pytest e2e -m policies

bench: setup images ## Measure: added latency, operator at rest, pod start
	@$(STAGE) -v bench $(PYTHON) -m bench
