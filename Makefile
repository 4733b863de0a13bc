# `make` alone lists the targets. Everything that is built goes into build/.
SHELL := /bin/bash
GO ?= go
BUILD := build
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
PREFIX ?= /usr
DESTDIR ?=

.DEFAULT_GOAL := help
.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## install what building needs (Debian and Ubuntu packages; nothing if it is there)
	@test/setup gcc make pkg-config libibverbs-dev librdmacm-dev

.PHONY: setup-test
setup-test: setup
	@test/setup ibverbs-utils perftest

.PHONY: build
build: setup ## build the binary
	$(GO) build -trimpath -ldflags "-X main.version=$(VERSION)" -o $(BUILD)/rdmabenchd ./cmd/rdmabenchd

.PHONY: build-lab
build-lab:
	$(GO) build -o $(BUILD)/lab ./test/lab

.PHONY: run
run: build build-lab ## a live fleet: the lab's, or this node's devices with CONFIG=file; DURATION=60s ends by itself
	@CONFIG="$(CONFIG)" DURATION="$(DURATION)" NODES="$(NODES)" test/run

.PHONY: test
test: test-go test-fleet test-rules ## prove it all: unit tests, the fleet in the lab, rules and dashboards on its metrics

.PHONY: test-go
test-go: setup-test verbsim ## unit tests with the race detector; the C under sanitizers
	$(GO) vet ./...
	$(GO) vet -tags lab ./test/fleet
	@test -z "$$(gofmt -l .)" || { gofmt -l .; echo "gofmt the files above"; exit 1; }
	$(GO) test -race ./...

.PHONY: verbsim
verbsim:
	@$(MAKE) --no-print-directory -C test/verbsim

.PHONY: test-rules
test-rules: setup ## rules and dashboards, with Debian's Prometheus; on the metrics of the last test-fleet, if there are any
	@test/setup-prometheus $(BUILD)/prometheus
	cd tools && $(GO) vet ./... && PROMETHEUS_DIR=$(CURDIR)/$(BUILD)/prometheus/usr/bin \
		RDMABENCH_METRICS=$$(ls -d $(CURDIR)/$(BUILD)/fleet/metrics 2>/dev/null) $(GO) test ./...

.PHONY: test-fleet
test-fleet: build build-lab ## daemons on real verbs in the lab
	$(GO) test -c -tags lab -o $(BUILD)/fleet.test ./test/fleet
	rm -rf $(BUILD)/fleet
	@# librdmacm keeps devices open until its process ends, which would hold up the tests that remove them
	$(BUILD)/lab exec --nodes 4 --out $(BUILD)/fleet -- bash -c '$(BUILD)/fleet.test -test.v -test.timeout 20m -test.skip CM && $(BUILD)/fleet.test -test.v -test.timeout 5m -test.run CM'

.PHONY: test-truth
test-truth: build build-lab ## on a quiet host: known delays, rates and losses, every two properties of a probe together, sweeps with faults
	$(GO) test -c -tags lab -o $(BUILD)/fleet.test ./test/fleet
	rm -rf $(BUILD)/truth $(BUILD)/fleet8
	$(BUILD)/lab exec --nodes 4 --out $(BUILD)/truth -- env LAB_TRUTH=1 $(BUILD)/fleet.test -test.v -test.timeout 40m -test.run '^Test(True|Matrix)'
	$(BUILD)/lab exec --nodes 8 --out $(BUILD)/fleet8 -- env LAB_TRUTH=1 $(BUILD)/fleet.test -test.v -test.timeout 20m -test.run '^TestSweep$$'

.PHONY: campaign
campaign: build build-lab ## hours: 200 runs of which each taint must be in the counters, 200 healthy sweeps that must blame nobody
	$(GO) test -c -tags lab -o $(BUILD)/fleet.test ./test/fleet
	$(BUILD)/lab exec --nodes 4 --out $(BUILD)/campaign -- env LAB_RUNS=200 $(BUILD)/fleet.test -test.v -test.timeout 6h -test.run '^TestTaintsAreTheCounters$$'
	$(BUILD)/lab exec --nodes 8 --out $(BUILD)/campaign8 -- env LAB_TRUTH=1 LAB_SWEEPS=200 $(BUILD)/fleet.test -test.v -test.timeout 24h -test.run '^TestSweep$$'

# Rounds and time of the native part, then of the lab part.
BENCH ?= short
BENCH_native_short := --runs 3 --budget 3m
BENCH_lab_short := --runs 3 --budget 5m
BENCH_native_full := --runs 9 --budget 10m
BENCH_lab_full := --runs 7 --budget 30m

.PHONY: bench
bench: build build-lab setup-test verbsim ## compare with perftest, qperf and a bare loop: table and build/bench.json; under 10 minutes, BENCH=full under 45
	$(GO) build -o $(BUILD)/bench ./test/bench
	$(BUILD)/bench --where native --out $(BUILD)/bench-native.json $(BENCH_native_$(BENCH)) > $(BUILD)/bench-native.txt; echo $$? > $(BUILD)/bench-native.rc
	$(BUILD)/lab exec --nodes 2 --out $(BUILD)/bench-out -- bash -c \
		'$(BUILD)/bench --where lab --out "$$LAB_OUT"/bench.json --with $(BUILD)/bench-native.json $(BENCH_lab_$(BENCH))'; \
		rc=$$?; cp $(BUILD)/bench-out/bench.json $(BUILD)/bench.json && exit $$((rc | $$(cat $(BUILD)/bench-native.rc)))

.PHONY: lab-shell
lab-shell: build build-lab ## a shell in a guest with soft nodes
	$(BUILD)/lab shell

.PHONY: lab-fault
lab-fault: build-lab ## make a node of the running lab faulty: NODE=2 FAULT="loss 1%"; FAULT=clear mends it
	@$(BUILD)/lab fault --node $(NODE) $(FAULT)

.PHONY: docs
docs: ## generate docs/metrics.md and the dashboards
	$(GO) test ./pkg/exporter -run 'Docs|Golden' -update
	cd tools && $(GO) run ./mkdash

.PHONY: lint
lint: ## golangci-lint, as pinned in tools/go.mod
	golangci-lint run

.PHONY: install
install: build ## install the binary, unit and example configuration below DESTDIR
	install -D -m 755 $(BUILD)/rdmabenchd $(DESTDIR)$(PREFIX)/bin/rdmabenchd
	install -D -m 644 systemd/rdmabenchd.service $(DESTDIR)$(PREFIX)/lib/systemd/system/rdmabenchd.service
	install -D -m 644 systemd/rdmabenchd.sysusers $(DESTDIR)$(PREFIX)/lib/sysusers.d/rdmabenchd.conf
	test -e $(DESTDIR)/etc/rdmabenchd/rdmabenchd.yaml || install -D -m 644 configs/minimal.yaml $(DESTDIR)/etc/rdmabenchd/rdmabenchd.yaml

.PHONY: clean
clean: ## remove build/
	rm -rf $(BUILD)
