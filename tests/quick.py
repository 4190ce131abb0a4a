"""A check for the middle of a change, at most three minutes of an idle machine: a small run, and what differs from `main`.

    python tests/quick.py

What differs is read from git: commits since the branch left main, changes that are not committed,
and new files. Of it are checked:

    step.py         notebooks, modules, script and README are in step
    notebooks.py    the changed notebooks run top to bottom, as many as take CHANGED_SECONDS in all;
                    of those that use a changed module, whose outputs may be stale too, as many as
                    take NOTEBOOK_SECONDS
    pytest          the test files that changed, that are named after a changed module, that import
                    one, that import what imports one, and, if a notebook changed, that read
                    notebooks: in this order, until LAST_START seconds after the beginning

Slow test files run only if they changed themselves; BROAD ones, which check the whole rather than
a chapter, also if the module changed that they are named after. What was not run is named at the
end; `make test` is the whole.
"""
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from conftest import FOLDERS, LEFT_OUT, LONG, ROOT, UNTIL
from tiny import TINY, run_quietly, tiny_data

FOLDERS_ON_PATH = ("book", "tests", *(f"tests/{name}" for name in FOLDERS))  # their files are imported by their bare names
CHANGED_SECONDS = 150  # of a processor, for notebooks that changed
NOTEBOOK_SECONDS = 60  # and for those that did not change themselves
LAST_START = 150  # seconds after which no test begins: the last ones may take half a minute
UNSTATED_SECONDS = 60  # of a page that does not say how long it takes
BROAD = ("test_demo", "test_fuzz", "test_joiner", "test_lab", "test_overwrite", "test_submission", "test_watch")


def git(root: Path, *words: str) -> list[str]:
    "The paths that a git command prints; ends with a sentence where it fails."
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip() or "no common commit"
        raise SystemExit(f"quick: git {words[0]} failed ({said}): a branch `main` is needed")
    return [path for path in re.split("[\0\n]", done.stdout) if path]


def changed_paths(root: Path) -> list[Path]:
    "What differs from `main`, deleted and new files too; relative to the root."
    (base,) = git(root, "merge-base", "main", "HEAD")
    known = git(root, "diff", "-z", "--name-only", "--no-renames", base)
    new = git(root, "ls-files", "-z", "--others", "--exclude-standard")
    return [Path(path) for path in sorted({*known, *new})]


def module_name(path: Path) -> str:
    "How a file is imported: golfnb/tools/cli.py as golfnb.tools.cli, tests/tiny.py and tests/tools/tiny.py as tiny."
    if path.parent.as_posix() in FOLDERS_ON_PATH:
        return path.stem
    parts = path.with_suffix("").parts
    if parts[0] in FOLDERS_ON_PATH:
        parts = parts[1:]
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def code_of(notebook: Path) -> list[str]:
    "The sources of a notebook's cells of code."
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def exported_module(notebook: Path) -> set[str]:
    "The module that a notebook makes; none for a page."
    source = "\n".join(code_of(notebook))
    return {f"golfnb.{name}" for name in re.findall(r"^#\|\s*default_exp\s+(\S+)", source, re.M)}


def stated_seconds(notebook: Path) -> int:
    "Seconds of a processor that a notebook says it takes."
    found = re.search(r"CPU run time of this (?:chapter|lesson): about (\d+) s", notebook.read_text(encoding="utf-8"))
    return int(found[1]) if found else UNSTATED_SECONDS


def imported(root: Path, path: Path) -> set[str]:
    """Every name that a file imports, with its dots.

    `from golfnb.run import run` gives golfnb.run.run and golfnb.run.run: a module or what is in one.
    """
    package = module_name(path.parent / "__init__.py").split(".")
    return names_imported((root / path).read_text(encoding="utf-8"), package)


def imported_by_notebook(notebook: Path) -> set[str]:
    "Every name that the cells of a notebook import; a cell that is not Python has none."
    found = set()
    for source in code_of(notebook):
        with suppress(SyntaxError):
            found |= names_imported(source, [])
    return found


def names_imported(source: str, package: list[str]) -> set[str]:
    "Every name that a source in a package imports."
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = [node.module] if node.module else []
            if node.level:
                parts = package[:len(package) + 1 - node.level] + parts
            origin = ".".join(parts)
            found |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    return found


@dataclass
class Selection:
    "Paths relative to the root: notebooks and test files to run, and what is left out of both."
    notebooks: list[Path]
    tests: list[Path]
    left_out: list[Path]


def reached(root: Path, modules: set[str]) -> set[str]:
    "The modules, and all of the package that import them, by whatever way."
    files = [path.relative_to(root) for path in sorted((root / "golfnb").rglob("*.py"))]
    needs = {module_name(path): imported(root, path) for path in files}
    found = set(modules)
    while more := {name for name, names in needs.items() if names & found} - found:
        found |= more
    return found


def notebooks_that_use(root: Path, modules: set[str]) -> list[Path]:
    "Pages that reach a module by whatever way, then chapters that import one; the quickest first."
    pages, chapters = [], []
    everything = reached(root, modules)
    for path in sorted((root / "nbs").rglob("*.ipynb"), key=stated_seconds):
        names = imported_by_notebook(path)
        if exported_module(path):
            chapters += [path] if names & modules else []
        elif names & everything:
            pages.append(path)
    return [path.relative_to(root) for path in pages + chapters]


def within_seconds(root: Path, notebooks: list[Path], seconds: int) -> list[Path]:
    "The first of some notebooks, as many as take so long."
    taken = []
    for path in notebooks:
        needed = stated_seconds(root / path)
        if needed <= seconds:
            taken.append(path)
            seconds -= needed
    return taken


def select(root: Path, changed: list[Path], slow: tuple[str, ...], broad: tuple[str, ...] = ()) -> Selection:
    "What checks the `changed` files; `slow` and `broad` are stems of test files."
    notebooks = [path for path in changed if path.suffix == ".ipynb" and (root / path).exists()]
    quickest = sorted(notebooks, key=lambda path: stated_seconds(root / path))
    checked = within_seconds(root, quickest, CHANGED_SECONDS)
    modules = {module_name(path) for path in changed if path.suffix == ".py"}
    for notebook in notebooks:
        modules |= exported_module(root / notebook)
    using = [path for path in notebooks_that_use(root, modules) if path not in notebooks]
    taken = within_seconds(root, using, NOTEBOOK_SECONDS)
    if notebooks:
        modules.add("nbformat")  # imported by the tests that read notebooks
    package = [path.relative_to(root) for path in sorted((root / "golfnb").rglob("*.py"))]
    importers = {module_name(path) for path in package if imported(root, path) & modules}
    named_after = {f"test_{module.split('.')[-1]}" for module in modules}
    put_off = {*slow, *set(broad) - named_after}
    tests, left_out = [], [path for path in quickest + using if path not in checked + taken]
    for path in sorted((root / "tests").rglob("test_*.py")):
        path = path.relative_to(root)
        if path in changed:
            tests.append(path)
        elif imported(root, path) & (modules | importers):
            chosen = left_out if path.stem in put_off else tests
            chosen.append(path)

    def how_far(path: Path) -> int:
        "0: changed, 1: named after a changed module, 2: imports one, 3: imports what imports one."
        far = (path in changed, path.stem in named_after, bool(imported(root, path) & modules), True)
        return far.index(True)

    return Selection(checked + taken, sorted(tests, key=how_far), left_out)


def smoke_run() -> None:
    "Data, training, artifact and scores in seconds, from the package in this process."
    from golfnb.recipes import demo

    with tempfile.TemporaryDirectory() as tmp:
        settings = TINY | tiny_data(Path(tmp)) | {"RUNS_DIR": tmp, "RUN_ID": "smoke"}
        found = run_quietly(demo, settings)
    scores = " ".join(f"{name}:{found[name]:.4f}" for name in found if name.endswith("_bpb"))
    print(f"a run of {found['steps']} steps: {scores}", flush=True)


def checks(chosen: Selection) -> list[list[str]]:
    "The commands that check a selection, each a script or module with its arguments."
    commands = [["tests/step.py", "check"]]
    if chosen.notebooks:
        commands.append(["tests/notebooks.py", "check", *map(str, chosen.notebooks)])
    if chosen.tests:
        pytest = ["-m", "pytest", "-x", "-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
        commands.append([*pytest, *map(str, chosen.tests)])
    return commands


def closing_line(chosen: Selection, seconds: float) -> str:
    "What may be said after all checks went well."
    if not chosen.left_out:
        return f"all in order after {seconds:.0f} s"
    left_out = " ".join(map(str, chosen.left_out))
    return (f"what ran is in order after {seconds:.0f} s; left out, because they take long, and so "
            f"not known to be: {left_out} (make test runs all)")


def main() -> int:
    start = time.perf_counter()
    changed = changed_paths(ROOT)
    chosen = select(ROOT, changed, LONG, BROAD)
    print(f"{len(changed)} files differ from main: {len(chosen.notebooks)} notebooks and "
          f"{len(chosen.tests)} test files to run", flush=True)
    smoke_run()
    commands = checks(chosen) if changed else []
    left = Path(tempfile.mkdtemp(), "left_out")
    env = {**os.environ, UNTIL: str(time.time() + LAST_START - (time.perf_counter() - start)), LEFT_OUT: str(left)}
    for command in commands:
        print(f"python {' '.join(command)}", flush=True)
        status = subprocess.run([sys.executable, *command], cwd=ROOT, env=env).returncode
        if status:
            print(f"quick: this failed: python {' '.join(command)}", file=sys.stderr)
            return status
    if left.is_file():  # tests that had no time to begin
        chosen.left_out += [Path(name) for name in sorted({*left.read_text().splitlines()})]
    print(closing_line(chosen, time.perf_counter() - start))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
