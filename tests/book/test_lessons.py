"""Lessons are short, ask four kinds of things, and their hidden tests tell right answers from the given cells."""
import re
from pathlib import Path

import nbformat
import pytest
from tiny import golfnb, one_sentence

from golfnb.settings import GolfError
from golfnb.tools.check import Score, Task, check_text, compare, find_task, lesson_tasks, read_board, run_text, task_cell
from golfnb.tools.lab import copy_notebooks

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sorted((ROOT / "nbs" / "lessons").glob("lesson[0-9][0-9]_*.ipynb"))
CELLS = 40  # a lesson is read in an hour
PLUMBING = re.compile(r"\bOSError\b|\bthreading\b|\bThread\(|\brules\(\)|\bBaseSettings\b|\batomic_write\b")


def number(path: Path) -> int:
    return int(path.stem[len("lesson"):][:2])


def tasks_of(path: Path) -> dict:
    return lesson_tasks(path.parent / "checks" / f"{number(path):02d}.py")


def answers_of(path: Path) -> Path:
    return ROOT / "nbs" / "answers" / f"answers{number(path):02d}.ipynb"


TASKS = [(path, name) for path in LESSONS for name in tasks_of(path)]


def rows(cell) -> int:
    "Lines that a cell takes on a page, about: prose is wrapped."
    return sum(1 + len(line) // 100 for line in cell.source.splitlines())


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)
def test_a_lesson_is_short_and_teaches(path):
    cells = nbformat.read(path, as_version=4).cells
    code = [c for c in cells if c.cell_type == "code" and not re.search(r"^#\| (hide|code-fold)", c.source, re.M)]
    text = [c for c in cells if c.cell_type == "markdown"]
    shown = sum(len("".join(o.get("text", "")).splitlines()) + 14 * ("data" in o and "image/png" in o.data) for c in cells for o in c.get("outputs", ()))
    lines = sum(map(rows, code))
    assert len(cells) <= CELLS, f"{len(cells)} cells, at most {CELLS}"
    assert lines < 1.5 * (shown + sum(map(rows, text))), "code is more than half of the page"  # a line of prose is half as high again
    assert not [m[0] for c in cells if (m := PLUMBING.search(c.source))]
    assert not [c for c in cells if re.search(r"^#\|\s*exports?", c.source, re.M)], "what is exported has its page in the reference"


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)
def test_a_lesson_asks(path):
    cells = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    guesses = [i for i, source in enumerate(cells) if re.search(r"^\w*guess\w* = None", source, re.M)]
    assert guesses and any("compare(" in source for source in cells[guesses[0] + 1:]), "a guess before its cell, compared in it"
    names = list(tasks_of(path))
    assert f"{number(path)}.bug" in names and len(names) >= 3
    for name in names:
        assert sum(source.startswith(f"# {name}\n") for source in cells) == 1, f"one cell for {name}"
        assert any(f'check("{name}"' in source for source in cells)


@pytest.mark.parametrize("path, name", TASKS, ids=[name for _, name in TASKS])
def test_a_task_tells_right_from_given(path, name):
    task = tasks_of(path)[name]
    given, answered = (run_text(task, task_cell(page, name)) for page in (path, answers_of(path)))
    assert len(task.hints) == 3 and all(20 < len(hint) < 300 for hint in task.hints)
    assert answered[0] and not given[0], (answered[1], given[1])
    if isinstance(answered[2], Score):
        assert answered[2].value == pytest.approx(answered[2].ours, rel=0.05), "the value of the book's answer is what it gives"
        assert given[2].value == pytest.approx(given[2].given, rel=5e-4), "the value of the given cell is what it gives"
        assert given[2].value > 1.02 * answered[2].ours, "the given cell leaves something to win"
    elif not name.endswith(".bug"):
        assert not re.search(r"\d", task.hints[2]), "a hint says what to do and leaves the numbers to the reader"


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)
def test_one_task_has_a_score(path):
    assert any(isinstance(run_text(task, task_cell(answers_of(path), name))[2], Score) for name, task in tasks_of(path).items())


def test_what_is_half_answered_or_imported_elsewhere_is_said():
    assert run_text(find_task("2.read"), "megabytes_a_second, per_cent_seen = 2.4, None")[1] == "not yet: per_cent_seen must have a value, found None"
    said = run_text(find_task("1.nats"), "bits_per_byte = math.log(2)")[1]
    assert said == "not yet: NameError: name 'math' is not defined (line 1 of your cell); this cell is run alone: what it uses must be imported or defined in it"
    later = run_text(Task("0.fast", fast, []), "class Seconds:\n    def __float__(self):\n        return before\nseconds = Seconds()")[1]
    assert later == "not yet: NameError: name 'before' is not defined (line 3 of your cell); this cell is run alone: what it uses must be imported or defined in it"


def fast(seconds):
    return Score(float(seconds), "s", 2.0, 9.0)


@pytest.mark.parametrize("seconds, passed, said", [
    (9.0, False, "not yet better: 9 s; "), (3.0, True, "passed with 3 s; "), (1.999, True, "passed with 1.999 s; "), (1.5, True, "better than the book's: 1.5 s; "),
])
def test_who_beats_the_book_is_told_so(seconds, passed, said):
    found = run_text(Task("0.fast", fast, []), f"seconds = {seconds}")
    assert found[:2] == (passed, said + "the given cell: 9; the book's answer: 2")


def test_a_reader_who_ends_the_process_or_loops_gets_a_sentence():
    assert check_text("7.scatter", "raise SystemExit(0)")[1] == "not yet: your cell ended its process"
    assert check_text("7.scatter", "while True: pass", limit_s=8)[1] == "not yet: your cell had not ended after 8 s"
    assert check_text("7.scatter", "print('--- verdict')\nscatter_us = 1")[:2] == (False, "not yet: 1 us is not it")


def test_the_command_looks_in_the_lab_and_keeps_what_was_reached(tmp_path):
    lab = tmp_path / "runs" / "lab"
    copy_notebooks(lab)
    assert (lab / "AGENTS.md").is_file() and not (lab / "lessons" / "checks").exists()
    first = golfnb("check", "7.scatter", cwd=tmp_path)
    assert (first.returncode, first.stdout) == (1, "7.scatter: not tried yet\n"), first
    (tmp_path / "mine.py").write_text("scatter_us = 66.0\n")
    assert golfnb("check", "7.scatter", "mine.py", cwd=tmp_path).stdout == "7.scatter: right\n"
    given = golfnb("check", "9.tiles", cwd=tmp_path)
    assert (given.returncode, given.stdout) == (1, "9.tiles: not yet better: 522 panels; the given cell: 522; the book's answer: 119\n"), given
    assert read_board(lab) == {"7.scatter": None}
    assert "7.scatter right   7.ranks open" in golfnb("check", cwd=tmp_path).stdout
    assert "7.scatter right   7.ranks open" in golfnb("check", cwd=lab / "lessons").stdout, "inside of a lab, that lab is meant"
    assert golfnb("check", "7.scatter", cwd=lab).stdout == "7.scatter: not tried yet\n"
    hint = golfnb("check", "7.scatter", "--hint", 2, cwd=tmp_path).stdout
    assert hint.startswith("7.scatter, hint 2 of 3: ")


@pytest.mark.parametrize("words, said", [
    (["7.nothing"], "lesson 7 has the tasks 7.bug"), (["99.bug"], "with a lesson of "), (["bug"], "must be named like 7.bug"),
    (["7.bug", "none.py"], "must be a file with your answer"), (["7.bug", "--hint", 4], "has hints 1 to 3"), (["7.bug"], "start golfnb lab, or name a file"),
])
def test_what_is_no_task_is_refused_in_a_sentence(words, said, tmp_path):
    done = golfnb("check", *words, cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr) and said in done.stderr, done.stderr


def test_a_guess_is_compared(capsys):
    for guess in (None, 2.0, -1.0):
        compare(guess, 4.0, "ms")
    assert capsys.readouterr().out == "4 ms; you wrote no guess\n4 ms; you guessed 2, off by a factor of 2\n4 ms; you guessed -1\n"


def test_a_notebook_of_ones_own_may_hold_the_cell(tmp_path):
    page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("# 7.scatter\nscatter_us = 1"), nbformat.v4.new_code_cell("# 7.scatter\nscatter_us = 66.0")])
    nbformat.write(page, tmp_path / "mine.ipynb")
    assert golfnb("check", "7.scatter", "mine.ipynb", cwd=tmp_path).stdout == "7.scatter: right\n"  # the last one counts
    with pytest.raises(GolfError, match="must have a cell that begins with the line # 7.bug"):
        task_cell(tmp_path / "mine.ipynb", "7.bug")


def test_hidden_tests_are_named_after_their_lessons():
    assert [number(path) for path in LESSONS] == [int(path.stem) for path in sorted((ROOT / "nbs" / "lessons" / "checks").glob("*.py"))]
    assert all(answers_of(path).is_file() for path in LESSONS)
    assert find_task("7.bug").takes == ["train"]
