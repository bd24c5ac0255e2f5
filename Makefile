# Everything that is done to this repository, by name. `make help` lists it.
#   VENV=folder  PYTHON=program  TORCH=cpu  MPI=system  go to the set-up: see scripts/install_all.sh

export VENV ?= .venv
# Python keeps what it compiles, also where a container says otherwise: without, each start of torch takes 4 s more
export PYTHONDONTWRITEBYTECODE :=

ACTIVATE := . "$$(cd "$$VENV" && pwd)/bin/activate" &&
PYTEST := python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
KERNELS := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE OPENBLAS_CORETYPE=Haswell
SAMPLE := tests/portability.py tests/test_moe.py tests/test_transformer.py tests/test_museum_pp.py \
	tests/test_museum_dp_step.py tests/test_tp_summa_mpi.py -k "not lessons_prove or 03-tensor or 04-sequence"
CPP_FILES := git ls-files -z '*.cpp' '*.hpp'

.PHONY: help setup test test-slow test-sample test-portability proof demo benchmark grade pictures lint format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-17s%s\n", $$1, $$2 }' Makefile

setup: ## environment, packages and C++; nothing to do when up to date
	@scripts/install_all.sh

test: setup ## tests in C++ and Python but for the slowest, three files at a time: starting ranks is mostly waiting
	@$(ACTIVATE) FIVED_TEXT="$$(python tests/grammar.py 0)" ctest --preset release
	@$(ACTIVATE) $(PYTEST) -m "not slow"

test-slow: setup ## tests that take longest, of what other tests try on fewer ranks or meshes
	@$(ACTIVATE) $(PYTEST) -m slow
	@$(ACTIVATE) FIVED_EXAMPLES=200 $(PYTEST) tests/test_tensors*.py

test-sample: setup ## some numerical tests with other kernels, another text and seed: two minutes
	@$(ACTIVATE) env $(KERNELS) $(PYTEST) --seed 1 $(SAMPLE)

test-portability: setup ## all tests under each of three kernel settings; lessons and binaries with five texts and seeds
	@$(ACTIVATE) for kernels in $(KERNELS); do env "$$kernels" $(PYTEST) --seed 1 || exit; done
	@$(ACTIVATE) set -- $(KERNELS) && for run in "1 5" "2 5" "3 5" "4 5" "5 20"; do echo "$$1, seed and steps: $$run" && \
		env "$$1" python -m pytest tests/portability.py --seed $${run% *} --steps $${run#* } || exit; \
		set -- $$2 $$3 $$1; done

proof: setup ## every mesh of 8 ranks, in three languages, and some of 12, 16 and 32 against one device: docs/proof*.md
	@$(ACTIVATE) python 06-hybrid-parallelism/pytorch/hybrid_proof.py --write docs/proof.md
	@$(ACTIVATE) OMP_NUM_THREADS=1 mpirun -np 8 python 06-hybrid-parallelism/pytorch/hybrid_proof_cpp.py --write docs/proof-cpp.md

demo: setup ## train in two pipeline stages, prove it equal to one device, draw the timeline
	@mkdir -p results
	@$(ACTIVATE) OMP_NUM_THREADS=1 python 02-pipeline-parallelism/pytorch/pp_zero_bubble.py --nproc 2 --versions zb-h1 --plot results/demo.png
	@echo "picture: results/demo.png, the timeline of a step: F forward, I and W the two halves of the backward pass"

benchmark: setup ## run every implementation and write results/report.html
	@$(ACTIVATE) python common/benchmarks/benchmark_all.py

grade: setup ## grade the exercises: what passes, what fails first; common/grade says how to grade one
	@$(ACTIVATE) python -m common.grade

pictures: setup ## draw the pictures that explain the course, into docs/images
	@$(ACTIVATE) python scripts/pictures/draw_pictures.py

lint: setup ## formatting, style and types; the C++ compiles with -Wall -Wextra -Werror
	@$(ACTIVATE) ruff format --check
	@$(ACTIVATE) ruff check
	@$(ACTIVATE) mypy
	@$(ACTIVATE) $(CPP_FILES) | xargs -0 clang-format --dry-run -Werror

format: setup ## rewrite the sources as lint wants them
	@$(ACTIVATE) ruff format
	@$(ACTIVATE) ruff check --fix
	@$(ACTIVATE) $(CPP_FILES) | xargs -0 clang-format -i

clean: ## remove what was built and the tools' caches; keep the environment and results/
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
