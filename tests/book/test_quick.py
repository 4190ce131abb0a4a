"""The quick check reads from git and from imports what a change touches."""
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import conftest
import pytest
from notebooks import stale_sentence
from quick import BROAD, changed_paths, closing_line, select

FILES = {
    "golfnb/__init__.py": "",
    "golfnb/settings.py": "import json\n",
    "golfnb/run/average.py": "from ..settings import setting\n",
    "golfnb/run/train.py": "from .average import Ema\n",
    "golfnb/tools/cli.py": "def train():\n    from ..run.train import train\n",
    "golfnb/tools/play.py": "from golfnb.run import train\n",
    "tests/tiny.py": "import golfnb.settings\n",
    "tests/run/test_average.py": "from golfnb.run.average import Ema\n",
    "tests/run/test_train.py": "from tiny import TINY\nfrom golfnb.run import train\n",
    "tests/tools/test_cli.py": "import golfnb.tools.cli as cli\n",
    "tests/tools/test_play.py": "def test():\n    from golfnb.tools.play import play\n",
    "tests/book/test_book.py": "import re\n",
    "tests/book/test_docs.py": "import nbformat\n",
}


def notebook(root: Path, name: str, first_line: str) -> Path:
    path = root / "nbs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": [first_line]}]}))
    return path.relative_to(root)


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def chosen(tree: Path, *changed: str | Path, slow=(), broad=()) -> tuple[list[str], list[str]]:
    "Stems of the tests to run, and of those left out."
    found = select(tree, [Path(path) for path in changed], slow, broad)
    return [path.stem for path in found.tests], [path.stem for path in found.left_out]


@pytest.mark.parametrize("changed, tests", [
    ("golfnb/run/average.py", ["test_average", "test_train"]),
    ("golfnb/run/train.py", ["test_train", "test_cli", "test_play"]),
    ("golfnb/tools/cli.py", ["test_cli"]),
    ("golfnb/settings.py", ["test_average"]),
    ("golfnb/removed.py", []),
    ("tests/tiny.py", ["test_train"]),
    ("tests/book/test_book.py", ["test_book"]),
    ("README.md", []),
])
def test_tests_are_those_of_the_module_and_of_what_imports_it(tree, changed, tests):
    assert chosen(tree, changed) == (tests, [])


def test_a_notebook_in_any_folder_stands_for_its_module(tree):
    path = notebook(tree, "tools/23_cli.ipynb", "#| default_exp tools.cli\n")
    page = notebook(tree, "index.ipynb", "# a page\n")
    assert chosen(tree, path, page) == (["test_cli", "test_docs"], [])
    assert select(tree, [path, page, Path("nbs/deleted.ipynb")], ()).notebooks == [path, page]


def page(root: Path, name: str, imports: str, seconds: int, exports: str = "") -> Path:
    path = root / "nbs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    code = [f"#| default_exp {exports}\n"] * bool(exports) + ["%matplotlib inline\n", imports]
    cells = [{"cell_type": "code", "source": [line]} for line in code]
    cells.append({"cell_type": "markdown", "source": [f"CPU run time of this chapter: about {seconds} s."]})
    path.write_text(json.dumps({"cells": cells}))
    return path.relative_to(root)


def test_notebooks_that_use_what_changed_run_too_as_far_as_time_allows(tree):
    "A page may be stale though nothing in it changed: it runs, or is named as left out."
    own = page(tree, "own.ipynb", "from golfnb.tools.cli import main", 45)
    long = page(tree, "start.ipynb", "import golfnb.tools.cli", 80)
    chapter = page(tree, "story/08_average.ipynb", "from golfnb.settings import setting", 5, "run.average")
    page(tree, "other.ipynb", "import numpy", 5)
    found = select(tree, [Path("golfnb/settings.py")], ())
    assert found.notebooks == [own, chapter] and found.left_out == [long]
    assert str(long) in closing_line(found, 1.0) and "all in order" not in closing_line(found, 1.0)
    found = select(tree, [Path("golfnb/run/train.py"), long], ())
    assert found.notebooks == [long, own] and not found.left_out
    assert closing_line(found, 1.0) == "all in order after 1 s"


def test_an_excerpt_shows_where_outputs_differ():
    kept, now = ("\n".join(f"line {i}" for i in range(200)) + end for end in ("0 was\nmore", "0 is\nmore"))
    said = stale_sentence("own.ipynb", 7, kept, now)
    first, *excerpts = said.splitlines()
    assert first.startswith("own.ipynb") and "line 200 on" in first
    assert "0 was" in excerpts[0] and "0 is" in excerpts[1] and excerpts[0].count("line") < 15


def test_slow_files_are_left_out_unless_they_changed(tree):
    slow = ("test_cli", "test_book")
    assert chosen(tree, "golfnb/run/train.py", slow=slow) == (["test_train", "test_play"], ["test_cli"])
    tests, left_out = chosen(tree, "golfnb/run/train.py", "tests/tools/test_cli.py", slow=slow)
    assert (tests, left_out) == (["test_cli", "test_train", "test_play"], [])


def test_a_broad_file_runs_for_itself_and_for_the_module_it_is_named_after(tree):
    assert chosen(tree, "golfnb/run/train.py", broad=["test_play"]) == (["test_train", "test_cli"], ["test_play"])
    for changed in ("golfnb/tools/play.py", "tests/tools/test_play.py"):
        assert chosen(tree, changed, broad=["test_play"]) == (["test_play"], [])
    assert {*BROAD} <= {path.stem for path in Path(__file__).parents[1].rglob("test_*.py")}


def test_what_differs_is_what_was_committed_changed_deleted_or_added_since_main(tree):
    def git(*words):
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *author, *words], cwd=tree, check=True, capture_output=True)

    git("init", "-b", "main")
    (tree / ".gitignore").write_text("*.log\n")
    git("add", ".")
    git("commit", "-m", "first")
    assert changed_paths(tree) == []
    git("checkout", "-b", "work")
    (tree / "golfnb/run/train.py").write_text("x = 1\n")
    git("commit", "-am", "committed")
    git("checkout", "main")
    (tree / "golfnb/run/average.py").write_text("x = 1\n")
    git("commit", "-am", "main goes on")
    git("checkout", "work")
    (tree / "tests/tiny.py").write_text("x = 1\n")
    (tree / "tests/book/test_book.py").unlink()
    (tree / "two words.py").write_text("")
    (tree / "run.log").write_text("")
    found = [str(path) for path in changed_paths(tree)]
    assert found == ["golfnb/run/train.py", "tests/book/test_book.py", "tests/tiny.py", "two words.py"]
    git("branch", "-m", "main", "trunk")
    with pytest.raises(SystemExit, match="`main`"):
        changed_paths(tree)


def test_a_changed_notebook_that_takes_long_is_left_out_and_named(tree):
    quick_one, long = page(tree, "a.ipynb", "import numpy", 100), page(tree, "b.ipynb", "import numpy", 140)
    found = select(tree, [long, quick_one], ())
    assert found.notebooks == [quick_one] and found.left_out == [long]


def test_a_test_that_would_begin_too_late_is_left_out_and_named(tmp_path):
    "In a folder with our conftest, after the time."
    (tmp_path / "tests").mkdir()
    shutil.copy(conftest.__file__, tmp_path / "tests")
    shutil.copy(Path(conftest.__file__).parent.parent / "pytest.ini", tmp_path)
    (tmp_path / "tests" / "test_x.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    left = tmp_path / "left_out"
    env = {**os.environ, conftest.UNTIL: str(time.time() - 1), conftest.LEFT_OUT: str(left)}
    said = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_x.py"], cwd=tmp_path, env=env, capture_output=True, text=True).stdout
    assert "2 skipped" in said and {*left.read_text().split()} == {"tests/test_x.py"}, said
