# The way in for people; CMakeLists.txt is what builds. Every target first installs what it lacks on Debian (scripts/setup.sh).

.PHONY: all demo test property fuzz install format check-format clean help

CTEST_FLAGS ?= --output-on-failure --no-label-summary -j2

all: ## build/apa, build/libapa.a, build/libapa.so
	@scripts/setup.sh build
	cmake --preset release
	cmake --build --preset release

demo: all ## a real layer of a language model: exact, adaptive and all-cold attention side by side
	@scripts/demo.sh

test: ## gcc with warnings as errors, then every test
	@scripts/setup.sh test
	@scripts/python-env.sh
	cmake --preset ci-gcc
	cmake --build --preset ci-gcc
	ctest --test-dir build-gcc $(CTEST_FLAGS)

property: ## 20000 random problems on every engine, and histories of the cache; SEED=... repeats, CASES=... more or fewer
	@scripts/setup.sh test
	cmake --preset ci-gcc
	cmake --build --preset ci-gcc --target property cache_property
	build-gcc/property --cases $(or $(CASES),20000) --seed $(or $(SEED),$(shell date +%s))
	build-gcc/cache_property --cases $(or $(CASES),20000) --seed $(or $(SEED),$(shell date +%s))

fuzz: ## libFuzzer on every target, SECONDS=600 each (clang)
	@scripts/setup.sh ci
	scripts/fuzz.sh $(or $(SECONDS),600)

install: all ## headers, libraries, command, apa.pc and the CMake package; PREFIX=… and DESTDIR=… are obeyed
	cmake --install build $(if $(PREFIX),--prefix $(PREFIX))

format: ## clang-format over all C files
	@scripts/setup.sh format
	@scripts/format.sh

check-format: ## fails when clang-format would change a file
	@scripts/setup.sh format
	@scripts/format.sh --check

clean: ## removes every build folder, build/venv included
	rm -rf build build-gcc build-clang build-sanitize build-fuzz build-tsan

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile
