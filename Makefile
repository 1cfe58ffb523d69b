# make demo | test | test-research | test-all | test-gpu | test-lowest | docs | oracle | mutants | lint | dist | constraints. Each makes .venv if it is missing; nothing here touches a model hub.
PY := .venv/bin/python
PARALLEL := -n 2 --dist loadfile
.PHONY: demo test test-research test-all test-gpu test-lowest docs oracle mutants lint dist constraints clean

.venv/installed: pyproject.toml
	@echo "installs 7 GB into .venv, silently for a minute or more"
	test -x $(PY) || python3 -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check uv
	$(PY) -m uv pip install --quiet --compile-bytecode --python $(PY) -e '.[test]' -e ./engine
	touch $@

# Fine-tunes the embedded model on this machine, in the next free runs/demo-N, and ends with the path of its gallery: in
# two processes, but for a machine that has a single GPU.
demo: .venv/installed
	@n=1; while [ -e runs/demo-$$n ]; do n=$$((n + 1)); done; \
	processes=$$($(PY) -c "import torch; print(1 if torch.accelerator.device_count() == 1 else 2)"); \
	.venv/bin/flowgrpo train configs/shapes.yaml run.name=demo-$$n run.processes=$$processes

# Bytecode is kept, whatever the environment says: hundreds of files would be compiled anew by each worker and command.
test: .venv/installed
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest $(PARALLEL) --ignore=tests/research

# The programs of research/, which measure and compare and are no part of the package.
test-research: .venv/installed
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest $(PARALLEL) tests/research

# With the certificates of all pipelines, every preset on every language model, and other cases like those of a plain run.
test-all: .venv/installed
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest $(PARALLEL) -m 'not gpu'

# What needs a real GPU, which all other tests do without.
test-gpu: .venv/installed
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -m gpu

# The suite with the lowest versions that pyproject.toml allows, in an environment of its own: several GB to download.
# The MKL of torch 2.9 rounds by where in memory a matrix lies, unless it is told not to; two equal networks then differ.
test-lowest: .venv-lowest/installed
	OMP_NUM_THREADS=1 MKL_CBWR=AUTO,STRICT .venv-lowest/bin/python -m pytest $(PARALLEL)

.venv-lowest/installed: pyproject.toml .venv/installed
	$(PY) -m uv venv --quiet --clear --seed --python $(PY) .venv-lowest
	$(PY) -m uv pip install --quiet --resolution lowest-direct --python .venv-lowest/bin/python -e '.[test]' -e ./engine
	touch $@

# The pages of docs/, README.md and the docstrings as a site that opens from the disk. A broken link ends it.
docs: .venv/docs-installed
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo site/index.html

.venv/docs-installed: .venv/installed
	$(PY) -m uv pip install --quiet --python $(PY) -e '.[docs,test]' -e ./engine
	touch $@

# Prints the tables of docs/research/oracle.md.
oracle: .venv/installed
	$(PY) research/oracle_tables.py

# Makes one wrong change of the code at a time, in a copy of it, and prints those that the nearest tests do not see.
mutants: .venv/installed
	$(PY) scripts/mutants.py

lint: .venv/installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# The sdist and the wheel, in dist/, after both were tried: their files, and the commands from the wheel in an empty folder.
dist: .venv/installed
	rm -rf dist
	$(PY) scripts/check_dist.py dist

# Writes the versions that .venv has, after `make test` has passed with them.
constraints: .venv/installed
	@{ sed '/^#/!d' constraints.txt; $(PY) -m uv pip freeze --quiet --python $(PY) --exclude-editable \
	| grep -vE '^(cuda-|nvidia-|triton|pip=|setuptools=|uv=)'; } > constraints.new && mv constraints.new constraints.txt

clean:
	rm -rf .venv .venv-lowest build dist site *.egg-info
