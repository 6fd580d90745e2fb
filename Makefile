# SPDX-License-Identifier: Apache-2.0

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

MODULES := $(dir $(shell git ls-files --cached --others --exclude-standard 'go.mod' '*/go.mod'))
EXAMPLES := $(shell git ls-files --cached --others --exclude-standard 'examples/*Caddyfile*')

COUNT ?= 5
FUZZTIME ?= 30s
BENCH ?= .
DURATION ?= 10m

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  %-10s %s\n", $$1, $$2 }'

.PHONY: check
check: format tidy vet lint alerts test ## What must pass before a commit; `bash .ci/run` is all that CI runs

.PHONY: test
test: needs ## Run every test once: race detector, random order, real Redis and Prometheus
	go test -race -shuffle=on -count=1 -timeout 40m ./...
	go test -C benchmarks -count=1 ./...

.PHONY: race
race: needs ## Run every test COUNT times (5), to find races and flaky tests
	go test -race -shuffle=on -count=$(COUNT) -timeout 60m ./...

.PHONY: soak
soak: ## Run three Caddys under random faults for DURATION (10m); SEED repeats a run
	tools/need.sh redis libfaketime
	go test -count=1 -timeout 3h -v -run '^TestSoak$$' ./internal/soak -soak $(DURATION) -seed $(or $(SEED),0)

.PHONY: compat
compat: ## Run the official clients against a running Caddy
	tools/need.sh node npm
	cd compat && npm ci --no-fund --no-audit && go test -shuffle=on -count=1 ./...

.PHONY: alerts
alerts: ## Check the Prometheus rules and run their unit tests
	tools/need.sh prometheus
	cd examples/prometheus && \
		PATH=$(CURDIR)/bin:$$PATH promtool check rules rules.yml && \
		PATH=$(CURDIR)/bin:$$PATH promtool test rules rules_test.yml

.PHONY: fuzz
fuzz: ## Run each fuzz test for FUZZTIME (30s)
	@grep -rlE '^func Fuzz' --include='*_test.go' --exclude-dir=node_modules . | while read -r file; do \
		for name in $$(sed -nE 's/^func (Fuzz[A-Za-z0-9_]*)\(.*/\1/p' "$$file"); do \
			echo "$$(dirname "$$file") $$name"; \
			(cd "$$(dirname "$$file")" && go test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) .); \
		done; \
	done

.PHONY: bench
bench: needs ## Measure briefly what this module costs a request, all in all (a minute)
	mkdir -p bin
	go run -C benchmarks ./load -short -json ../bin/load.json

.PHONY: performance
performance: needs ## Measure that at length, on a quiet machine (six minutes), and refresh the documentation
	go run -C benchmarks ./load -docs ..
	go run -C benchmarks ./scale -docs ..

.PHONY: microbench
microbench: ## Run the benchmarks BENCH (all) six times, into bin/bench.txt for benchstat
	mkdir -p bin
	go test -run '^$$' -bench '$(BENCH)' -benchmem -count 6 ./... | tee bin/bench.txt

.PHONY: bench-once
bench-once: # run each benchmark once, so that they always work
	go test -run '^$$' -bench . -benchtime 1x ./...

.PHONY: plots
plots: ## Draw the plots of the documentation anew
	go run -C benchmarks ./plot -o ../docs/workers.svg

.PHONY: lint
lint: bin/golangci-lint ## Run golangci-lint
	@for dir in $(filter-out ./tools/ tools/,$(MODULES)); do (cd $$dir && $(CURDIR)/bin/golangci-lint run ./...); done

bin/golangci-lint: tools/go.mod tools/go.sum
	go build -C tools -o ../bin/ github.com/golangci/golangci-lint/v2/cmd/golangci-lint

.PHONY: format
format: # fail if a file is not as gofmt writes it
	@files=$$(gofmt -l $$(git ls-files --cached --others --exclude-standard '*.go')); \
	if [ "$$files" ]; then echo "not formatted: $$files"; exit 1; fi

.PHONY: tidy
tidy: # fail if a go.mod or go.sum is not as go mod tidy writes it
	@for dir in $(MODULES); do go mod tidy -C $$dir -diff; done

.PHONY: vet
vet: # run go vet
	@for dir in $(filter-out ./tools/ tools/,$(MODULES)); do go vet -C $$dir ./...; done

.PHONY: build
build: ## Build bin/caddy: Caddy with this module, for people without xcaddy
	CGO_ENABLED=0 go build -trimpath -ldflags '-w -s' -tags nobadger,nomysql,nopgx -o bin/ ./cmd/caddy
	bin/caddy list-modules | grep -x http.handlers.stripe_ratelimit

.PHONY: caddyfile
caddyfile: ## Format the example Caddyfiles and check that they adapt
	@for file in $(EXAMPLES); do \
		go run ./cmd/caddy fmt --overwrite $$file; \
		go run ./cmd/caddy adapt --config $$file --adapter caddyfile >/dev/null; \
	done

.PHONY: xcaddy
xcaddy: ## Build bin/caddy-xcaddy from this checkout with xcaddy
	tools/xcaddy.sh

.PHONY: needs
needs:
	tools/need.sh redis libfaketime prometheus
