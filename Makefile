# The few commands: `make demo` to see it work, `make test` to check all of it.
PYTHON ?= python3
BIN := .venv/bin
# Where it is set, every process would compile torch's sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test wheel-test test-all test-unprivileged test-container test-slurm test-ray lint types unit quick format docs bench clean

setup: .venv/ready

# The pip that comes with older Pythons takes 20 s longer.
.venv/ready: pyproject.toml benchmarks/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Plait needs Python 3.11 or newer, but $(PYTHON) is {v.major}.{v.minor}; try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --upgrade pip
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[dev]' --editable benchmarks
	@touch $@

# The tests and what they import are compiled once, before three workers would each do it.
.venv/compiled: .venv/ready
	@PYTHONPATH=tests $(BIN)/python -c 'import support.warm, pytest; pytest.main(["--collect-only", "-qq"])' > $@

demo: setup
	$(BIN)/plait demo

# Types are checked and the site is built beside the tests, which often wait.
test: lint .venv/docs
	$(MAKE) --jobs 3 types docs unit
	$(MAKE) --jobs 2 test-unprivileged test-container

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Three at a time on two cores: many tests wait for processes.
unit: .venv/compiled
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal

# When started as root: what depends on the rights of a process, once more with those of an ordinary user, and
# what depends on a container's limits within these. All tests pass there.
CONFINED = OMP_NUM_THREADS=1 tests/support/confined.sh
test-unprivileged: .venv/compiled
	$(CONFINED) user $(BIN)/pytest -n 2 --dist worksteal -p no:cacheprovider tests/comm/test_groups.py \
	  tests/comm/test_handshake.py tests/launch/test_launch.py tests/launch/test_control.py \
	  tests/launch/test_launch_faults.py::test_what_starts_workers_takes_them_along_even_where_one_is_stopped \
	  tests/launch/test_launch_faults.py::test_a_worker_that_shows_no_sign_of_life_is_ended_and_the_others_go_on \
	  tests/cli/test_os_errors.py tests/cli/test_status.py

test-container: .venv/compiled
	$(CONFINED) container $(BIN)/pytest -n 2 --dist worksteal -p no:cacheprovider tests/comm/test_groups.py \
	  tests/comm/test_channels.py tests/data/test_loaders.py tests/launch/test_control.py

# The wheel in an empty environment: all of it can be imported there, and the tour runs. A minute or two.
wheel-test: setup
	rm -rf build && mkdir -p build/wheel && $(PYTHON) -m venv build/wheel/venv
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	build/wheel/venv/bin/pip install --quiet --constraint constraints.txt build/wheel/plait-*.whl
	cd build/wheel && venv/bin/python -c 'import importlib, pkgutil, plait; [importlib.import_module(each.name) for each in pkgutil.walk_packages(plait.__path__, "plait.")]'
	cd build/wheel && venv/bin/plait demo

# Further workloads, models, faults and settings of what `make test` shows once.
test-all: test
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal -m extended

# On a real Slurm cluster of three nodes in network namespaces: root, and Debian's slurm-wlm and munge.
test-slurm: .venv/compiled
	OMP_NUM_THREADS=1 $(BIN)/pytest -p no:cacheprovider -m extended tests/launch/test_slurm.py

# Runs and sweeps on real raylets in network namespaces; needs root and ray (pip install -e '.[ray]').
test-ray: .venv/compiled
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'extended or not extended' tests/launch/test_ray.py

# What starts no workers and no commands and takes no second: for a look between two edits.
quick: .venv/compiled
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m 'not processes and not slow and not extended'

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site in build/site, which needs no server and no network; a warning is an error.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo wrote build/site; echo next: open build/site/index.html in a browser

.venv/docs: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[docs]'
	@touch $@

bench: setup
	$(BIN)/python benchmarks/train_overhead.py; first=$$?; $(BIN)/python benchmarks/startup.py && exit $$first

clean:
	rm -rf .venv build runs .mypy_cache .ruff_cache .pytest_cache
