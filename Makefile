# make setup   .venv with what golfnb runs with; says what to type next
# make demo    documents -> tokenizer -> shards -> torchrun -> artifact -> scores -> report, in runs/demo
# make quick   in the middle of a change: a small run, and the checks of what differs from main
# make test    notebooks, modules, script and README in step; notebooks top to bottom; pytest
# make book    the site from the notebooks, offline, with its links checked: _book/html/index.html
# make book-check  every page of it in a headless Chromium, on desktop and phone, light and dark
# make muon    dist/golfnb_muon-*.whl: the optimizer alone, as a package that needs torch only
# make export  nbdev_clean, nbdev_export, tests/exported.py, tests/helps.py, golfnb script, nbdev_readme: golfnb/*.py, the script and README.md from the notebooks

SHELL := /bin/bash
BIN := .venv/bin
STAMP := .venv/.golfnb-ready
DEV_STAMP := .venv/.golfnb-dev-ready
PIP := pip==26.3  # installs in four fifths of the time that the one of Python 3.11 takes
INSTALL := $(BIN)/python -m pip install --no-compile $(if $(shell test -t 2 && echo terminal),,--quiet --progress-bar off)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo quick test book book-check muon export
setup: $(STAMP)
	@echo "next: $(BIN)/golfnb data build FOLDER_OR_FILES   (your texts), or: make demo"

demo: $(STAMP)
	$(BIN)/golfnb demo

quick: $(DEV_STAMP)
	$(BIN)/python tests/quick.py

test: $(DEV_STAMP)
	$(BIN)/python tests/step.py check & $(BIN)/python tests/notebooks.py check && wait $$!
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

book: $(DEV_STAMP)
	$(BIN)/python book/build.py

book-check: book
	$(BIN)/python book/browse.py

muon: $(STAMP)
	$(BIN)/python muon/build.py

export: $(DEV_STAMP)
	$(BIN)/python tests/step.py write

$(STAMP): requirements.txt setup.py settings.ini
	@echo "golfnb: installing into .venv takes some minutes: on Linux about 3 GB to download and 6 GB on the disk, most of it torch with CUDA"
	@echo "golfnb: without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu before make takes a far smaller torch"
	@set -e; \
	if [ ! -x $(BIN)/python ]; then \
	  for p in "$$PYTHON" python3.11 python3.12 python3.13 python3; do \
	    [ -n "$$p" ] && command -v "$$p" >/dev/null && "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' && found=$$p && break; \
	  done; \
	  [ -n "$$found" ] || { echo "golfnb: Python 3.11 or newer is needed, found none; install one or set PYTHON=/path/to/python" >&2; exit 1; }; \
	  echo "making .venv with $$found"; "$$found" -m venv .venv; \
	fi
	$(INSTALL) $(PIP)
	$(INSTALL) -r requirements.txt  # most of it is never imported: not compiled
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --use-pep517 -e .
	$(BIN)/python -m pip check
	@touch $@

$(DEV_STAMP): $(STAMP) requirements-dev.txt book/quarto
	@echo "golfnb: what tests and the book need beside it: about 0.2 GB to download"
	$(INSTALL) -r requirements-dev.txt
	$(BIN)/python -m pip check
	@install -m 755 book/quarto $(BIN)/quarto  # what nbdev_readme asks for
	@git config diff.notebook.textconv "$(BIN)/jupytext --quiet --to py:percent --output -" || true  # see .gitattributes
	@git config merge.notebook.driver "$(BIN)/nbdev_merge %O %A %B %P" || true
	@touch $@
