"""Sixty odd programs through the command line: each is taken as Python would, or refused in one sentence that names the mistake and, where its own text raised, the line."""
import json
import re
from dataclasses import asdict, fields

import pytest
from forked import run_python
from tiny import TINY, clean_env, golfnb, one_sentence, tiny_data

from golfnb.settings import GolfError
from golfnb.tools import starting
from golfnb.tools.programs import RECIPES, copied_program, find_program, setting_text, settings_of

TAG = '    "Every number of this recipe."\n'
TOP = "from collections.abc import Callable\n"
MAIN = "def main(run: Run) -> dict:\n"
CODEC = "CODEC = Best()\n"
SETTING = "from golfnb.settings import setting\n"
OWN = "OWN = dict(\n"


def top(text: str) -> list:
    "Edits that put something below the first import."
    return [(TOP, TOP + text)]


def before_main(text: str) -> list:
    return [(MAIN, f"{text}\n\n\n{MAIN}")]


def own(text: str) -> list:
    "Edits that give OWN another number."
    return before_main(f"OWN = OWN | {{{text}}}")


def declared(text: str) -> list:
    "Edits that declare another setting."
    return [(TOP, TOP + SETTING), (TAG, f"{TAG}    {text}\n")]


def method(text: str) -> list:
    return [(TAG, f"{TAG}{text}")]


# title -> edits of a copy of demo, or a whole text or bytes; words of the sentence, or None where it is taken
ODD = {
    "a whole number for a float": (own("'muon_wd': 0"), None),
    "0 for a bool": (own("'ve_enabled': 0"), None),
    "a float of NumPy": (top("import numpy as np\n") + own("'matrix_lr': np.float64(0.02)"), None),
    "a float with a whole default": (declared('rise: float = setting(4, "a rise: factor")'), None),
    "annotations as text": (declared('rise: "float" = setting(4, "a rise: factor")'), None),
    "a text for a number": (own("'num_layers': '4'"), "NUM_LAYERS must be a whole number, found '4'"),
    "a fraction for a whole number": (own("'iterations': 1e3"), "ITERATIONS must be a whole number, found 1000.0"),
    "True for a number": (own("'iterations': True"), "ITERATIONS must be a whole number, found True"),
    "None for a number": (own("'seed': None"), "SEED must be a whole number, found None"),
    "a list for a text": (own("'ve_layers': [0, 1]"), "VE_LAYERS must be plain text"),
    "a Path for a text": (top("from pathlib import Path\n") + own("'data_path': Path('x')"), "DATA_PATH must be plain text"),
    "a text that steers a terminal": (own("'data_path': '\\x1b[31m'"), "DATA_PATH must be plain text"),
    "2 for a bool": (own("'ve_enabled': 2"), "VE_ENABLED must be 0 or 1, found 2"),
    "NaN": (own("'matrix_lr': float('nan')"), "MATRIX_LR must be a finite number"),
    "infinity": (own("'matrix_lr': float('inf')"), "MATRIX_LR must .*found inf"),
    "a number without end": (own("'matrix_lr': 10**400"), "MATRIX_LR must be a finite number"),
    "a word that is no choice": (own("'attention': 'fast'"), "ATTENTION must be one of"),
    "a name in OWN that is no setting": (own("'iteratons': 5"), "OWN must hold settings .*'iteratons'"),
    "a name in OWN that is no text": (own("5: 5"), "OWN must hold settings .*found 5"),
    "OWN['recipe'] a number": (own("'recipe': 5"), "recipe=5"),
    "OWN['recipe'] missing": (before_main("del OWN['recipe']"), "recipe=''"),
    "OWN['recipe'] with a slash": (own("'recipe': 'a/b'"), "recipe='a/b'"),
    "OWN a list": (before_main("OWN = [*OWN]"), "OWN as a dict"),
    "OWN None": (before_main("OWN = None"), "OWN as a dict, found None"),
    "OWN a function": (before_main("OWN = dict"), "OWN as a dict"),
    "a field without setting()": (method("    rise: int = 10\n"), "rise must be declared with its meaning"),
    "a field with field()": ([*top("from dataclasses import field\n"), *method("    rise: list = field(default_factory=list)\n")], "rise must be declared with its meaning"),
    "a field without a default": (method("    rise: int\n"), r"odd\.py line \d+"),
    "a setting of a list": (declared('rise: list = setting([1], "a rise: factor")'), r"found \[1\].*odd\.py line \d+"),
    "a setting of None": (declared('rise: int = setting(None, "a rise: factor")'), r"default .*found None.*odd\.py line \d+"),
    "a setting without its meaning": (declared("rise: int = setting(4)"), r"meaning.*odd\.py line \d+"),
    "a setting without an annotation": (declared('rise = setting(4, "a rise: factor")'), r"'rise'.*odd\.py line \d+"),
    "bounds that are none": (declared('rise: int = setting(4, "a rise: factor", bounds="0..9")'), r"bounds must .*odd\.py line \d+"),
    "a default out of its bounds": (declared('rise: int = setting(-4, "a rise: factor", bounds="> 0")'), "RISE must be above 0"),
    "a default that is no choice": (declared('rise: str = setting("c", "a rise: word", "a", "b")'), "RISE must be one of a, b"),
    "a default without a declaration": (method("    num_layers = 7\n"), "num_layers must have the default of its declaration"),
    "a default that is changed later": (before_main("Settings.num_layers = 7"), "num_layers must have the default of its declaration"),
    "Settings that are no dataclass": ([*declared('rise: int = setting(4, "a rise: factor")'), ("@dataclass\nclass Settings", "class Settings")], "must be a dataclass, found rise"),
    "Settings of no group": (before_main("class Settings:\n    pass"), "Settings must be a class that derives"),
    "Settings an object": (before_main("Settings = Settings()"), "Settings"),
    "a __post_init__ that sets a number": (method("    def __post_init__(self):\n        self.muon_wd = 1\n"), None),
    "a __post_init__ that raises": (method("    def __post_init__(self):\n        self.there\n"), r"odd\.py line \d+.*AttributeError"),
    "rules() that raises": (method("    def rules(self):\n        yield 1 / 0, 'x'\n"), r"odd\.py line \d+.*ZeroDivisionError"),
    "rules() that ends the process": (method("    def rules(self):\n        raise SystemExit(0)\n"), r"odd\.py line \d+.*SystemExit"),
    "rules() without end": (method("    def rules(self):\n        yield from self.rules()\n"), r"odd\.py line \d+.*RecursionError"),
    "rules() of nothing": (method("    def rules(self):\n        return None\n"), "rules of .* must yield"),
    "rules() of something else": (method("    def rules(self):\n        yield 'x'\n"), "rules of .* must yield"),
    "WORDS that are none": ([('    WORDS = ("LOADER', '    WORDS = ("NO LOADER')], "WORDS must be written"),
    "a codec's class": ([(CODEC, "CODEC = Best\n")], "a codec must be an object"),
    "a codec that is None": ([(CODEC, "CODEC = None\n")], "a codec must be an object"),
    "a codec without a name": ([(CODEC, "CODEC = type('Odd', (Best,), {'name': None})()\n")], "codec"),
    "a codec that raises": ([(CODEC, "CODEC = type('Odd', (Best,), {'compress': lambda self, raw, shapes: 1 / 0})()\n")], "codec .*ZeroDivisionError"),
    "a codec of nothing": ([(CODEC, "CODEC = type('Odd', (Best,), {'compress': lambda self, raw, shapes: None})()\n")], "codec"),
    "a codec that knows nothing": ([(CODEC, "CODEC = type('Odd', (Best,), {'known': lambda self: None})()\n")], "codec Odd must"),
    "sys.exit(0) at import": (top("import sys\nsys.exit(0)\n"), r"found SystemExit: 0 \(odd\.py line \d+\)"),
    "an error that is no Exception": (top("class Odd(BaseException):\n    pass\n\n\nraise Odd('no')\n"), r"found Odd: no \(odd\.py line \d+\)"),
    "an error of many lines": (top("raise ValueError('a\\nb\\x1b[31mc')\n"), r"ValueError: a b.*\(odd\.py line \d+\)"),
    "a recursion at import": (top("def f():\n    return f()\n\n\nf()\n"), r"RecursionError.*\(odd\.py line \d+\)"),
    "main a number": ([(MAIN, "main = 5\n\n\ndef other(run: Run) -> dict:\n")], "must define main as a recipe does, found 5"),
    "half a program": (b"OWN = {}\n", "must define .*, found no CODEC"),
    "an empty file": (b"", "must define .*, found no OWN"),
    "no Python": (b"def main(:\n", "found: .*line 1"),
    "a null byte": (b"OWN = {}\n\x00\n", "null|Python"),
    "not UTF-8": (b"# \xe9\nOWN = {}\n", "must be a file of Python, found: .*encoding"),
    "a codec that Python has not": (b"# -*- coding: klingon -*-\nOWN = {}\n", "klingon"),
    "brackets within brackets": (b"OWN = " + b"(" * 500 + b")" * 500 + b"\n", "Python|nested"),
    "a sum without end": (b"OWN = " + b"+".join([b"1"] * 20_000) + b"\n", "Python|Recursion|found no"),
    "latin-1 with a cookie": ("# -*- coding: latin-1 -*-\n# \xe9\n".encode("latin-1"), None),
    "a byte order mark": ("\ufeff".encode(), None),
    "a backslash before a blank line": ([(CODEC, "CODEC = Best() \\\n\n")], None),
    "an own decorator called patch": (before_main("def patch(f):\n    return f\n\n\n@patch\ndef helper():\n    return 1"), None),
}
NAMES = ("numbers", "random", "json", "dataclasses", "types", "signal", "torch", "numpy", "golfnb", "test", "__init__", "__main__", "class", "a.b", "a b", "-x", "é")


def program(change, name: str) -> bytes:
    "The bytes of an odd program."
    text = copied_program("demo", "odd")
    if isinstance(change, bytes):
        head = change.startswith((b"# -*- coding: latin", "\ufeff".encode()))
        return change + text.encode() if head else change
    for old, new in change:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text.encode()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return [f"{name}={value}" for name, value in ({k: v for k, v in TINY.items() if k != "RECIPE"} | tiny_data(folder)).items()]


@pytest.fixture
def unstarted(monkeypatch):
    "Settings and script of what is ready to start."
    started = []

    def start_run(folder, s, *rest):
        script = (folder / "train_gpt.py").read_bytes()
        compile(script, "script", "exec")
        started.append((s, script))
        return 0

    monkeypatch.setattr(starting, "start_run", start_run)
    return started


@pytest.mark.parametrize("title", ODD)
def test_odd_programs(title, data, tmp_path, unstarted):
    change, words = ODD[title]
    (tmp_path / "odd.py").write_bytes(program(change, "odd"))
    done = golfnb("train", "odd.py", "--nproc", 1, *data, "RUN_ID=a", cwd=tmp_path)
    if words is None:
        assert done.returncode == 0 and not done.stderr and len(unstarted) == 1, done.stderr
        for spec in fields(unstarted[0][0]):
            assert type(getattr(unstarted[0][0], spec.name)) is (float if spec.type == "float" else type(spec.default)) or spec.name == "rise", spec.name
        return
    assert done.returncode == 2 and one_sentence(done.stderr) and re.search(words, done.stderr), done.stderr
    assert not unstarted and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_program_may_have_any_name(name, data, tmp_path, unstarted):
    "Also that of a module of the standard library, or of golfnb; what Python could not keep apart is refused in a sentence."
    (tmp_path / f"{name}.py").write_bytes(program([], name))
    done = golfnb("train", f"./{name}.py", "--nproc", 1, *data, "RUN_ID=a", cwd=tmp_path)
    assert (done.returncode, len(unstarted)) == (0, 1) or done.returncode == 2 and one_sentence(done.stderr), done.stderr
    import numbers
    assert "golfnb" not in getattr(numbers, "__doc__", "") and hasattr(numbers, "Number")


LATE = {  # what a rank alone can find; words of its last line
    "step raises": ([("    elapsed, stop = t.clock()\n", "    elapsed, stop = t.clock()\n    print(1 / (t.steps - 1))\n")], r"odd\.py line \d+, of your own program, must run, found ZeroDivisionError: "),
    "a file beside it raises": ([(TOP, f"{TOP}from acts import Acts\n"), ("    elapsed, stop = t.clock()\n", "    elapsed, stop = Acts().there\n")], r"acts\.py line 3, of your own program, must run, found KeyError: 'there'"),
    "build gives nothing": ([("    return Parts(", "    Parts(")], r"odd\.py line \d+, of your own program, must run, found AttributeError: 'NoneType' "),
    "main ends the process": ([("    run.begin()\n", "    run.begin()\n    raise SystemExit(0)\n")], r"odd\.py line \d+, of your own program, must run, found SystemExit: 0"),
    "main does not finish": ([("    return run.finish()\n", "    return run.summary\n"), ("    score(run, p, artifact)\n", "")], r"main of odd must end with run\.finish\(\), found no summary\.json"),
}


@pytest.mark.parametrize("title", LATE)
def test_what_a_rank_meets_is_named_with_its_line(title, data, tmp_path):
    "Its traceback is the program's own: the sentence below it says so."
    change, words = LATE[title]
    (tmp_path / "odd.py").write_bytes(program(change, "odd"))
    (tmp_path / "acts.py").write_text("class Acts:\n    def __getattr__(self, name):\n        raise KeyError(name)\n")
    assert golfnb("script", "odd.py", "-o", "s.py", cwd=tmp_path).returncode == 0
    env = dict(word.split("=", 1) for word in data)
    done = run_python(["-m", "golfnb.tools.checkpoint", "s.py"], tmp_path, clean_env(**env, RUN_ID="a", TTT_ENABLED="0"))
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode and re.match(f"golfnb: {words}", last), done.stderr
    line = re.search(r"odd\.py line (\d+)", last)
    if line and "step" in title:
        assert "1 / (t.steps - 1)" in (tmp_path / "odd.py").read_text().splitlines()[int(line[1]) - 1]


@pytest.mark.parametrize("name", RECIPES)
def test_settings_written_down_are_read_back_to_the_same_bytes(name):
    "As a run that goes on gets them: pr2135 says 4 for a float, and a file's header has it."
    recipe = find_program(name)
    s = settings_of(recipe, {})
    words = {field: setting_text(value) for field, value in asdict(s).items()}
    again = settings_of(recipe, {field.upper(): text for field, text in words.items()})
    assert json.dumps(asdict(s)) == json.dumps(asdict(again))
    s.mlp_mult = 2
    assert json.dumps(s.mlp_mult) == "2.0"
    with pytest.raises(GolfError, match="MLP_MULT must be a finite number, found '2'"):
        s.mlp_mult = "2"
