# Six commands do everything on a machine with Python 3.11 and network access to PyPI:
#
#   make check      every algorithm, on real documents, against the reference (4 CPU ranks, or all GPUs)
#   make test       ruff, pyright, every test with a sample of its cases, the notebooks; the kernels' tests once more on a GPU
#   make test-all   the same with all cases, and the check of the kernels in plain PyTorch
#   make newest     the check with the newest torch and Triton that PyPI has; warnings are errors
#   make course     the notebooks with holes, for a student who builds a Canon, in build/course
#   make paper      the pages, the figures and the PDF under paper, from the records
#
# All but `make newest` make .venv with the versions of requirements.txt and install the package in place. That one
# makes .venv-newest, of 6 GB.
#
# `.venv/bin/pytest --nbval` runs the tests and the notebooks together. `.venv/bin/jupyter lab notebooks` opens the notebooks.

PYTHON  ?= python3
WORKERS ?= 2

BIN   := .venv/bin
STAMP := .venv/.installed

# Ranks and test workers already fill the cores: one thread each keeps them out of each other's way.
export OMP_NUM_THREADS ?= 1

.PHONY: install check test types tests cells test-all newest notebooks course paper clean
.DEFAULT_GOAL := check

install: $(STAMP)

$(STAMP): requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

check: $(STAMP)
	$(BIN)/canon check

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --jobs=3 types tests cells # what waits in one of them leaves its core to the others
	if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$(BIN)/pytest --numprocesses=$(WORKERS) --dist=worksteal --gpu tests; \
	fi

types: $(STAMP)
	$(BIN)/pyright

tests: $(STAMP)
	$(BIN)/pytest --numprocesses=$(WORKERS) --dist=worksteal -p no:nbval tests

cells: $(STAMP)
	$(BIN)/pytest --nbval --nbval-cell-timeout=300 notebooks

test-all: export CANON_CASES = all
test-all: test
	$(BIN)/canon check --backend torch --record canon-check/torch.json

newest:
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager --editable .
	.venv-newest/bin/python -m pip list --disable-pip-version-check | grep -E '^(torch|triton|numpy) '
	.venv-newest/bin/python -W error -m canon check --record canon-check/newest.json

# Runs the .md twins and writes them, with their outputs, as .ipynb beside them.
notebooks: $(STAMP)
	cd notebooks && ../$(BIN)/jupytext --to ipynb --execute *.md

# Writes the notebooks with holes into build/course, except those that a student has begun, and links beside them.
course: $(STAMP)
	$(BIN)/python notebooks/course.py build

# Writes the pages and the figures of `paper`, then the PDF.
paper: $(STAMP)
	$(BIN)/python paper/measured.py
	$(BIN)/python paper/long_tables.py
	$(BIN)/python paper/paper_pdf.py

clean:
	rm -rf .venv .venv-newest build dist canon-check .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -o -name '*.egg-info' | xargs rm -rf
