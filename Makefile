# The two commands of the README, and shorthands. Everything they do is a step of `cargo xtask` (see xtask/).
# `cargo build` first, so that a fresh clone shows the compiler's progress rather than silence.
.PHONY: help run test tidy fmt

help:
	@echo 'make run    set everything up and run a first sandbox'
	@echo 'make test   run all checks and tests'
	@echo 'make tidy   check the rules that the compiler does not know'
	@echo 'make fmt    format the sources'
	@echo 'ARGS="--list" shows the steps of run and test; ARGS="--only STEP" does one of them'

run:
	@cargo build --locked --package xtask
	@cargo xtask run $(ARGS)

test:
	@cargo build --locked --package xtask
	@cargo xtask test $(ARGS)

tidy:
	@cargo xtask tidy $(ARGS)

fmt:
	@cargo fmt --all
