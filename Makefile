# The two commands of the README, and shorthands. Everything they do is a step of `cargo xtask` (see xtask/).
# `cargo build` first, so that a fresh clone shows the compiler's progress rather than silence.
.PHONY: help run check test tidy fmt linker

help:
	@echo 'make run    set everything up and run a first sandbox'
	@echo 'make check  format, tidy, lints and unit tests: what needs no virtual machine'
	@echo 'make test   run all checks and tests'
	@echo 'make tidy   check the rules that the compiler does not know'
	@echo 'make fmt    format the sources'
	@echo 'ARGS="--list" shows the steps of run, check and test; ARGS="--only STEP" does one of them'

# rustc links with the C compiler; without one not even xtask, which installs everything else, can be built.
linker:
	@command -v cc >/dev/null || { apt-get update && apt-get install -y --no-install-recommends build-essential; }

run: linker
	@cargo build --locked --package xtask
	@cargo xtask run $(ARGS)

check: linker
	@cargo build --locked --package xtask
	@cargo xtask check $(ARGS)

test: linker
	@cargo build --locked --package xtask
	@cargo xtask test $(ARGS)

tidy:
	@cargo xtask tidy $(ARGS)

fmt:
	@cargo fmt --all
