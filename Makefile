# Everything a contributor and CI run. Needs Python 3.11 or later and make; brings the rest itself.

SHELL := /bin/bash
.DEFAULT_GOAL := help

UV_VERSION := 0.13.8
UV ?= $(or $(shell command -v uv),.tools/uv)
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# Three processes on two cores, as tests wait for a third of their time; a file stays in one of them.
# ARGS='-n 0' runs all in one.
BESIDE := -n 3 --dist loadfile --no-loadscope-reorder --durations=25
# Tests that only compute: the plan, the wire, the text, the decisions.
PURE := tests/engine_plan tests/protocol tests/link tests/text tests/router/dispatch tests/router/placement \
	tests/operator/test_decisions.py tests/operator/test_rollout.py tests/operator/test_children.py \
	tests/operator/test_fields.py tests/operator/test_templates.py tests/scripts tests/observability \
	tests/test_documents.py tests/test_layout.py tests/test_settings.py
# Tests that compare with answers of transformers that are stored (tests/reference/judged.py).
JUDGED := tests/text/test_chat_template.py tests/text/test_tokenizer.py
ARGS ?=

# Images of Python for containers often set it, and then each of the thousand processes that tests start
# compiles torch's sources once more: half of what a worker's start costs.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help:  ## Show the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: .venv/synced  ## Make .venv with everything in it (the other targets do it when needed)

.tools/uv:
	python3 scripts/get_uv.py $(UV_VERSION) .tools

.venv/synced: pyproject.toml uv.lock | $(filter .tools/uv,$(UV))
	$(UV) sync --locked --all-extras
	@touch $@

.PHONY: setup-gemma
setup-gemma: setup  ## Also install Gemma 3 270M for nightly tests: 240 MB, under the terms of Gemma
	$(UV) sync --locked --all-extras --group gemma

.PHONY: up
up: setup  ## Serve the embedded model on port 8000 (ARGS='--model PATH ...' for another)
	$(BIN)/tandem up $(ARGS)

.PHONY: check
check: setup  ## Run the core tests that only compute: under 2.5 minutes
	$(PYTEST) $(BESIDE) -n 2 -m core $(PURE) $(ARGS)

.PHONY: test
test: setup  ## Run the core tests of every layer: under 10 minutes (ARGS='tests/hub -x' to choose)
	$(PYTEST) $(BESIDE) -m "not full and not nightly and not cluster" $(ARGS)

.PHONY: test-full
test-full: setup  ## Run every test that needs no cluster, but those of `make nightly`
	$(PYTEST) $(BESIDE) -m "not nightly and not cluster" $(or $(ARGS),tests)

.PHONY: test-rest
test-rest: setup  ## Run what `make test` leaves to `make test-full`
	$(PYTEST) $(BESIDE) -m "not core and not nightly and not cluster" $(or $(ARGS),tests)

.PHONY: nightly
nightly: setup  ## Run the tests of minutes: far walks of the model checker, large fleets, every layout
	$(PYTEST) $(BESIDE) -m "nightly and not cluster" $(or $(ARGS),tests)
	TANDEM_JUDGE=check $(PYTEST) -n 0 $(JUDGED)

REQUESTS ?= 10000
SEED ?= 1

.PHONY: chaos
chaos: setup  ## Hurt a stack of four workers under load (REQUESTS=10000 SEED=1, ARGS='--help')
	$(BIN)/python -m tests.chaos line --requests $(REQUESTS) --seed $(SEED) $(ARGS)

.PHONY: fuzz
fuzz: setup  ## Throw requests made from the OpenAPI document at a stack (ARGS='--seconds 600 --seed 1')
	UV_PROJECT_ENVIRONMENT=.tools/fuzz $(UV) sync --locked --no-install-project --only-group fuzz
	$(BIN)/python -m tests.fuzz --schemathesis .tools/fuzz/bin/schemathesis $(ARGS)

EXAMPLES ?= 20000

.PHONY: fuzz-links
fuzz-links: setup  ## Throw anything at the links of KV: control, descriptors, data (EXAMPLES=20000 of each test)
	FUZZ_EXAMPLES=$(EXAMPLES) $(PYTEST) -n 0 --timeout 0 tests/kvtransfer/fuzz $(ARGS)

# Each in an environment of its own, as far as their requirements differ. Not by `npm ci`: it fails if a
# registry lacks what opencode has for other systems.
CLIENTS := $(CURDIR)/.tools/clients

.PHONY: clients
clients: setup  ## Try others' clients, unmodified, against a stack (wants Node, Go and Rust)
	for place in packages agents instructor lm-eval aiperf guidellm; do UV_PROJECT_ENVIRONMENT=$(CLIENTS)/$$place \
		$(UV) sync --quiet --project tests/clients --locked --only-group $$place || exit 1; done
	mkdir -p $(CLIENTS)/node && cp tests/clients/node/* $(CLIENTS)/node
	npm install --silent --no-audit --no-fund --prefix $(CLIENTS)/node
	cd tests/clients/go && go build -o $(CLIENTS)/go/client .
	CARGO_TARGET_DIR=$(CLIENTS)/rust cargo build --quiet --locked \
		--manifest-path tests/clients/rust/Cargo.toml
	$(BIN)/python -m tests.clients --environments $(CLIENTS) $(ARGS)

.PHONY: screens
screens: setup  ## Take docs/screens anew: `tandem top`, `tandem explain`, /ui (wants a Chromium)
	$(BIN)/python -m tests.screens $(ARGS)

.PHONY: cov
cov: setup  ## Run the tests and say which lines they never reach
	$(PYTEST) -m "not nightly and not cluster" --cov --cov-report=term-missing $(or $(ARGS),tests)

.PHONY: lint
lint: setup  ## Check style, format, types, layers, unused names and sizes
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/vulture
	$(BIN)/python -m scripts.house
	$(BIN)/python -m scripts.words
	$(BIN)/codespell README.md CONTRIBUTING.md docs

.PHONY: house
house: setup  ## Print the sizes of the code base next to the limits of house.toml
	$(BIN)/python -m scripts.house

.PHONY: format
format: setup  ## Put every file into the house's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: reference
reference: setup  ## Make the reference tokens anew, with transformers as the judge
	$(BIN)/python tests/reference/make_reference.py smollm2
	$(BIN)/python tests/reference/make_reference.py small
	TANDEM_JUDGE=make $(PYTEST) -n 0 $(JUDGED)

MERMAID := mermaid-11.17.2.tgz

.tools/docs-assets/$(MERMAID):
	mkdir -p $(@D)
	npm pack --silent --pack-destination $(@D) $(subst mermaid-,mermaid@,$(basename $(MERMAID)))
	tar -xzf $@ -C $(@D) package/dist/mermaid.min.js

# Not with --quiet, which hides from --strict what it fails at.
.PHONY: docs
docs: | $(filter .tools/uv,$(UV)) .tools/docs-assets/$(MERMAID)  ## Build the documentation into site/, with every link checked (requires npm)
	UV_PROJECT_ENVIRONMENT=.tools/docs $(UV) sync --quiet --locked --no-install-project --only-group docs
	.tools/docs/bin/mkdocs build --strict $(ARGS)

.PHONY: docs-screen
docs-screen: setup docs  ## Look at the built documentation in a Chromium: docs/screens/docs-site.png
	$(BIN)/python -m tests.screens.site

.PHONY: manifests
manifests: setup  ## Make the CRD manifests anew from the operator's types
	$(BIN)/python -m tandem.operator.api.crd

.PHONY: proto
proto: setup  ## Make the messages of gRPC anew from router/tandem/router/api/grpc/tandem.proto
	cd router/tandem/router/api/grpc && $(abspath $(UV)) tool run --from grpcio-tools==1.85.1 \
		python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. tandem.proto

.PHONY: reference-pages
reference-pages: setup  ## Make docs/reference anew from flags, metrics, CRD and errors
	$(BIN)/python -m scripts.reference

.PHONY: dashboards
dashboards: setup  ## Make the boards of charts/tandem/dashboards anew from scripts/dashboards
	$(BIN)/python -m scripts.dashboards

.PHONY: lint-dashboards
lint-dashboards: setup  ## Hold the boards to Grafana's dashboard-linter (Go builds it)
	$(BIN)/python -m scripts.dashboards.lint

.PHONY: rules
rules: setup  ## Check alerts and recording rules and try their cases with promtool (builds it with Go)
	$(BIN)/python -m scripts.rules

.PHONY: observe
observe: setup  ## Ask a real Prometheus for every panel and rule under load: docs/observability-live.md
	$(BIN)/python -m tests.observe $(ARGS)

.PHONY: observe-cluster
observe-cluster: setup  ## The same on a cluster of two nodes, with Prometheus in a pod of it (6 min)
	$(BIN)/python -m tests.observe.in_cluster $(ARGS)

.PHONY: alerts
alerts: setup  ## Make faults and time the alerts that they fire on a real Prometheus (to 20 min)
	$(BIN)/python -m tests.observe.firing $(ARGS)

.PHONY: alerts-operator
alerts-operator: setup  ## The same for faults of services and operators on an API server (20 min)
	$(BIN)/python -m tests.observe.firing --operator $(ARGS)

.PHONY: traces
traces: setup  ## Draw two requests as an OpenTelemetry collector wrote them down (builds it with Go)
	$(BIN)/python -m tests.collector $(ARGS)

.PHONY: traces-cluster
traces-cluster: setup  ## A request's trace and the operator's on a cluster, the collector in a pod (4 min)
	$(BIN)/python -m tests.collector.in_cluster $(ARGS)

CLUSTER := $(BIN)/python -m tests.cluster
NODES ?= 2

.PHONY: cluster
cluster: setup  ## Raise a Kubernetes on this machine (NODES=2); `make cluster-down` ends it
	$(CLUSTER) build
	$(CLUSTER) up $(NODES)
	@$(CLUSTER) env

.PHONY: cluster-down
cluster-down: setup  ## End that Kubernetes and leave nothing behind
	$(CLUSTER) down

.PHONY: images
images: setup  ## Build the images with docker, podman or buildah (ARGS='--help' for the ways)
	$(BIN)/python -m scripts.images $(ARGS)

# Only a KUBECONFIG that is said to make counts: one of the shell may be a cluster that matters.
GIVEN := $(if $(filter command line,$(origin KUBECONFIG)),--kubeconfig $(KUBECONFIG))

.PHONY: e2e
e2e: setup  ## Raise a cluster and run its suite (KUBECONFIG=FILE for another one)
	$(BIN)/python -m tests.e2e_cluster $(GIVEN) $(ARGS)

.PHONY: kind
kind: setup  ## Raise a kind cluster, load the images into it and run the suite there
	scripts/kind.sh $(ARGS)

.PHONY: kind-here
kind-here: setup  ## The same on Debian without a container engine: brings dockerd, kind, a node image
	scripts/kind_here.sh $(ARGS)

.PHONY: wheel
wheel: setup  ## Build the wheel and install it as the router's image does
	rm -rf dist
	$(UV) build --quiet --wheel --out-dir dist
	$(BIN)/python scripts/check_wheel.py "$(UV)" dist/*.whl

.PHONY: clean
clean:  ## Remove what the other targets made (not the prepared models)
	rm -rf .venv .tools dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
