"""A check for the middle of a change, about two minutes: a small run, and what differs from `main`.

    python tests/quick.py

What differs is read from git: commits since the branch left main, changes that are not committed,
and new files. Of it are checked:

    step.py         notebooks, modules, script and README are in step
    notebooks.py    the changed notebooks run top to bottom
    pytest          the test files that changed, that import a changed module or one that imports
                    a changed module, and, if a notebook changed, that read notebooks

Slow test files run only if they changed themselves; BROAD ones, which check the whole rather than
a chapter, also if the module changed that they are named after. `make test` is the whole.
"""
import ast
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from conftest import LONG, ROOT
from tiny import TINY, run_quietly, tiny_data

FOLDERS_ON_PATH = ("tests", "book")  # their files are imported by their bare names
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
    "How a file is imported: golfnb/tools/cli.py as golfnb.tools.cli, tests/tiny.py as tiny."
    parts = path.with_suffix("").parts
    if parts[0] in FOLDERS_ON_PATH:
        parts = parts[1:]
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def exported_module(notebook: Path) -> set[str]:
    "The module that a notebook makes; none for a page."
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells)
    return {f"golfnb.{name}" for name in re.findall(r"^#\|\s*default_exp\s+(\S+)", source, re.M)}


def imported(root: Path, path: Path) -> set[str]:
    """Every name that a file imports, with its dots.

    `from golfnb.run import run` gives golfnb.run and golfnb.run.run: a module or what is in one.
    """
    package = module_name(path.parent / "__init__.py").split(".")
    found = set()
    for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
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
    "Paths relative to the root: notebooks and test files to run, and test files left out."
    notebooks: list[Path]
    tests: list[Path]
    left_out: list[Path]


def select(root: Path, changed: list[Path], slow: tuple[str, ...], broad: tuple[str, ...] = ()) -> Selection:
    "What checks the `changed` files; `slow` and `broad` are stems of test files."
    notebooks = [path for path in changed if path.suffix == ".ipynb" and (root / path).exists()]
    modules = {module_name(path) for path in changed if path.suffix == ".py"}
    for notebook in notebooks:
        modules |= exported_module(root / notebook)
    if notebooks:
        modules.add("nbformat")  # imported by the tests that read notebooks
    package = [path.relative_to(root) for path in sorted((root / "golfnb").rglob("*.py"))]
    importers = {module_name(path) for path in package if imported(root, path) & modules}
    named_after = {f"test_{module.split('.')[-1]}" for module in modules}
    put_off = {*slow, *set(broad) - named_after}
    tests, left_out = [], []
    for path in sorted((root / "tests").glob("test_*.py")):
        path = path.relative_to(root)
        if path in changed:
            tests.append(path)
        elif imported(root, path) & (modules | importers):
            chosen = left_out if path.stem in put_off else tests
            chosen.append(path)
    return Selection(notebooks, tests, left_out)


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
        pytest = ["-m", "pytest", "-x", "-q", "-n", "2", "--dist", "loadfile"]
        commands.append([*pytest, *map(str, chosen.tests)])
    return commands


def main() -> int:
    start = time.perf_counter()
    changed = changed_paths(ROOT)
    chosen = select(ROOT, changed, LONG, BROAD)
    print(f"{len(changed)} files differ from main: {len(chosen.notebooks)} notebooks and "
          f"{len(chosen.tests)} test files to run", flush=True)
    if chosen.left_out:
        print(f"left out, because they take long: {' '.join(map(str, chosen.left_out))}", flush=True)
    smoke_run()
    commands = checks(chosen) if changed else []
    for command in commands:
        print(f"python {' '.join(command)}", flush=True)
        status = subprocess.run([sys.executable, *command], cwd=ROOT).returncode
        if status:
            print(f"quick: this failed: python {' '.join(command)}", file=sys.stderr)
            return status
    print(f"all in order after {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
