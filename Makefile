# make demo | test | test-all | lint. Each makes .venv if it is missing; nothing here touches a model hub.
PY := .venv/bin/python
.PHONY: demo test test-all lint clean

.venv/installed: pyproject.toml
	test -x $(PY) || python3 -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check uv
	$(PY) -m uv pip install --quiet --compile-bytecode --python $(PY) -e '.[test]'
	touch $@

# Fine-tunes the embedded model on this machine, in the next free runs/demo-N, and ends with the path of its gallery.
demo: .venv/installed
	@n=1; while [ -e runs/demo-$$n ]; do n=$$((n + 1)); done; \
	.venv/bin/flowgrpo train configs/shapes.yaml run.name=demo-$$n run.processes=2

test: .venv/installed
	$(PY) -m pytest

# With the certificates of all pipelines, about 8 minutes more.
test-all: .venv/installed
	$(PY) -m pytest -m 'zoo or not zoo'

lint: .venv/installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

clean:
	rm -rf .venv build *.egg-info
