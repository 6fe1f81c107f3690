# make setup   create .venv from the lock file, with everything that the tests need (DEVICE=cpu, the default, or DEVICE=gpu)
# make demo    recpo fit on a simulated log: prepare, train, align, compare, decide, export, report; installs only what it takes
# make test    the tests (without the slow ones, which .ci/run adds)
# make lint    ruff and mypy
# make docs    the documentation site, build/site/index.html; warnings are errors
# make examples  environments of Airflow and Dagster, in which the tests run examples/daily, and of a server of MLflow

DEVICE ?= cpu
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed-$(DEVICE)
RUNNABLE := .venv/.runnable-$(DEVICE)
SHIM := $(if $(filter cpu,$(DEVICE)),./requirements/shim-fbgemm-gpu)

.PHONY: setup demo test lint docs examples clean

# A new environment. The pip that Python brings reads an index three times as slowly as a current one.
define VENV
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "recpo needs Python 3.11 or newer: make PYTHON=python3.11 setup")'
	$(PYTHON) -m venv $(1)
	$(1)/bin/pip install --quiet --disable-pip-version-check pip==26.3
endef

setup: $(INSTALLED)

$(INSTALLED): requirements/$(DEVICE).lock pyproject.toml requirements/shim-fbgemm-gpu/pyproject.toml
	$(call VENV,.venv)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check $(SHIM) -r requirements/$(DEVICE).lock -e .
	touch $@

# Of the same pinned versions, what recpo itself needs, with the search of `recpo fit` and the server.
$(RUNNABLE): requirements/$(DEVICE).lock pyproject.toml
	$(call VENV,.venv)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c requirements/$(DEVICE).lock -e '.[serve,search]'
	touch $@

demo: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(RUNNABLE))
	$(BIN)/python -m recpo.cli.main demo --out demo --overwrite true

test: setup
	$(BIN)/python -m pytest -m "not slow" -n 2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy recpo

# The site has an environment of its own (.venv-docs); the options of the verbs come from recpo in .venv.
docs: setup .venv-docs/.installed
	RECPO_PYTHON=$(abspath $(BIN)/python) NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-docs/.installed: requirements/docs.lock
	$(call VENV,.venv-docs)
	.venv-docs/bin/pip install --quiet --no-compile --disable-pip-version-check -r requirements/docs.lock
	touch $@

examples: .venv-airflow/.installed .venv-dagster/.installed .venv-mlflow/.installed

.venv-mlflow/.installed: requirements/mlflow.lock
	$(call VENV,.venv-mlflow)
	.venv-mlflow/bin/pip install --quiet --no-compile --disable-pip-version-check --no-deps -r $<
	touch $@

.venv-%/.installed: examples/daily/requirements-%.txt
	$(call VENV,.venv-$*)
	.venv-$*/bin/pip install --quiet --no-compile --disable-pip-version-check --no-deps -r $<
	touch $@

clean:
	rm -rf .venv .venv-docs .venv-airflow .venv-dagster .venv-mlflow demo build *.egg-info
