"""Programs with one mistake each end in one sentence, which names the program's own line where its own code failed; odd ones without a mistake run."""
import contextlib
import io
import sys

import pytest

from golfnb.settings import GolfError, settings_from
from golfnb.tools.cli import main_cli
from golfnb.tools.programs import copied_program, file_program, settings_of

TEXT = copied_program("demo", "mine")
DOC = '    "Every number of this recipe."\n'
MAIN = "def main(run: Run) -> dict:"
SET = "from golfnb.settings import setting\n"


def field(line: str, env: str = "") -> tuple[str, str]:
    "A copy with a setting more, and what the command line says."
    return SET + TEXT.replace(DOC, f"{DOC}    {line}\n"), env


def own(more: str) -> tuple[str, str]:
    "A copy with other numbers of its own."
    return f"{TEXT}\n\nOWN = {more}\n", ""


def end(more: str) -> tuple[str, str]:
    "A copy with more lines at its end."
    return f"{TEXT}\n\n{more}\n", ""


MISTAKES = {  # what is wrong -> (text, settings), words of the sentence
    "no setting()": (field("rise: int = 10", "RISE=5"), "setting rise of mine.py must be declared with setting"),
    "no default": (field("rise: int"), r"TypeError: non-default argument 'rise'"),
    "a field()": (SET + "from dataclasses import field\n" + TEXT.replace(DOC, DOC + "    rise: int = field(default=3)\n"), "declared with setting"),
    "a default_factory": ("from dataclasses import field\n" + TEXT.replace(DOC, DOC + "    rise: list = field(default_factory=list)\n"), "declared with setting"),
    "no meaning": (field("rise: int = setting(3)"), r"TypeError.*\(mine.py line"),
    "a meaning that is no text": (field("rise: int = setting(3, 4)"), "setting rise of mine.py must be declared"),
    "bounds of no kind": (field("rise: int = setting(3, 'a: b', bounds='> 5')"), "must have bounds out of"),
    "bounds that are no text": (field("rise: int = setting(3, 'a: b', bounds=5)"), "must have bounds out of"),
    "another type than its default": (field("rise: int = setting(3.5, 'a: b')"), "rise of mine.py must be a bool, int, float or str"),
    "a text for a number": (field("rise: int = setting('3', 'a: b')"), "rise of mine.py must be a bool, int, float or str"),
    "a tuple": (field("rise: tuple = setting((1, 2), 'a: b')"), "rise of mine.py must be a bool, int, float or str"),
    "a list": (field("rise: list = setting([1], 'a: b')"), r"ValueError: mutable default.*\(mine.py line"),
    "nothing": (field("rise: int = setting(None, 'a: b')"), "rise of mine.py must be a bool, int, float or str"),
    "a choice that is none": (field("rise: str = setting('a', 'a: b', 'b', 'c')"), "default that is one of"),
    "a base's setting with another type": (field("iterations: str = setting('many', 'a: b')"), "iterations of mine.py must stay a number as int|iterations"),
    "a setting beyond its bounds": (field("rise: int = setting(-3, 'a: b', bounds='> 0')"), "RISE must be above 0"),
    "no dataclass": (SET + TEXT.replace("@dataclass\nclass Settings", "class Settings").replace(DOC, DOC + "    rise: int = setting(3, 'a: b')\n"), "@dataclass above Settings"),
    "settings that are none": (end("Settings = 5"), "must define Settings as a class"),
    "settings of no group": (end("@dataclass\nclass Settings: pass"), "must derive Settings from RunSettings"),
    "settings that are a function": (end("def Settings(**own): pass"), "must derive Settings from RunSettings"),
    "a typo in OWN": (own("OWN | {'iteratons': 5}"), "found 'iteratons': did you mean iterations"),
    "an unknown name in OWN": (own("OWN | {'zzzz': 5}"), "found 'zzzz': declare it"),
    "a number as a name in OWN": (own("OWN | {5: 5}"), "found 5"),
    "a text for a number in OWN": (own("OWN | {'iterations': '5'}"), "must give iterations as int, found '5'"),
    "a float for an int in OWN": (own("OWN | {'iterations': 5.0}"), "must give iterations as int"),
    "a truth for a number in OWN": (own("OWN | {'matrix_lr': True}"), "must give matrix_lr as float"),
    "nothing in OWN": (own("OWN | {'seed': None}"), "must give seed as int"),
    "no number in OWN": (own("OWN | {'matrix_lr': float('nan')}"), "MATRIX_LR must"),
    "a number without end in OWN": (own("OWN | {'matrix_lr': 10**400}"), "must give matrix_lr as float"),
    "a list in OWN": (own("OWN | {'ve_layers': [2, 3]}"), "must give ve_layers as str"),
    "a number as recipe": (own("OWN | {'recipe': 5}"), "recipe=5"),
    "no recipe": (own("{}"), "found recipe=''"),
    "golfnb's recipe": (own("OWN | {'recipe': 'golf'}"), "recipe='golf'"),
    "a recipe with a slash": (own("OWN | {'recipe': '../x'}"), r"recipe='\.\./x'"),
    "OWN as a list": (own("[1]"), "must have a dictionary OWN"),
    "OWN as a function": (end("def OWN(): pass"), "must have a dictionary OWN"),
    "rules that raise": (field("def rules(self):\n        yield 1 / 0, 'x'"), r"ZeroDivisionError.*\(mine.py line"),
    "rules that are none": (field("def rules(self):\n        return 5"), "rules"),
    "rules that yield no pairs": (field("def rules(self):\n        yield True"), "rules"),
    "rules without golfnb's": (field("def rules(self):\n        yield self.no_such, 'x'"), r"AttributeError.*\(mine.py line"),
    "a setting that checks itself and fails": (field("def __post_init__(self): raise KeyError('odd')"), r"KeyError.*\(mine.py line"),
    "no codec": (end("CODEC = None"), "must be an object whose class derives from"),
    "a codec's class": (end("CODEC = Best"), "must be an object whose class derives from"),
    "a codec's word": (end("CODEC = 'lzma'"), "must be an object whose class derives from"),
    "a codec with golfnb's name": (end("CODEC = type('Mine', (Best,), {'name': 'lzma', 'decompress': print})()"), "lzma|name"),
    "a codec that cannot say what it knows": (end("CODEC = type('Mine', (Best,), {'known': lambda self: 1 / 0})()"), "ZeroDivisionError"),
    "a codec that knows nothing": (end("CODEC = type('Mine', (Best,), {'known': lambda self: None})()"), "codec"),
    "main as a number": (end("main = 5"), "must define main as a function"),
    "build as nothing": (end("build = None"), "must define build as a function"),
    "no score": (end("del score"), "found no score"),
    "an end at import": ("import sys\nsys.exit(0)\n" + TEXT, r"SystemExit: 0 \(mine.py line 2\)"),
    "an end with words": ("raise SystemExit('enough')\n" + TEXT, r"SystemExit: enough \(mine.py line 1\)"),
    "quit": ("quit()\n" + TEXT, r"SystemExit.*\(mine.py line 1\)"),
    "an error of its own": ("class Odd(BaseException): pass\nraise Odd('x')\n" + TEXT, r"Odd: x \(mine.py line 2\)"),
    "a recursion without end": ("def f(): f()\nf()\n" + TEXT, r"RecursionError.*\(mine.py line 1\)"),
    "a file of nothing": ("", "found no OWN"),
    "zeros": (b"\0\0\0", "must be a file of Python"),
    "no text": (b"\xff\xfe\x00x", "must be a file of Python"),
    "no UTF-8 without a cookie": ("# é\n".encode("latin-1") + TEXT.encode(), "must be a file of Python"),
    "an unknown encoding": (b"# coding: klingon\n" + TEXT.encode(), "must be a file of Python, found: .*klingon"),
    "a cookie and a mark that disagree": ("\ufeff# coding: latin-1\n".encode() + TEXT.encode(), "must be a file of Python"),
    "UTF-16": (TEXT.encode("utf-16"), "must be a file of Python"),
    "brackets without end": ("x = " + "(" * 5000, "must be a file of Python"),
    "half a line": (TEXT + "\ndef half(", "must be a file of Python, found: .*mine.py, line"),
    "a return at the top": (TEXT + "\nreturn 5\n", "SyntaxError"),
    "a name that is not there": (TEXT + "\nprint(nothing_there)\n", r"NameError.*\(mine.py line"),
    "golfnb's name that is not there": ("from golfnb.model import NoSuch\n" + TEXT, r"ImportError.*NoSuch"),
}
FINE = {  # odd, and no mistake
    "a byte order mark": "\ufeff".encode() + TEXT.encode(),
    "latin-1": b"# -*- coding: latin-1 -*-\n# \xe9\n" + TEXT.encode(),
    "CRLF": TEXT.replace("\n", "\r\n").encode(),
    "a decorator called patch": TEXT + "\n\ndef patch(f):\n    return f\n\n\n@patch\ndef helper():\n    return 1\n",
    "a backslash before a blank line": TEXT.replace("CODEC = Best()\n", "CODEC = Best() \\\n\n"),
    "a self test": TEXT + "\n\nif __name__ == '__main__':\n    assert False\n",
    "an int for a float": field("gain: float = setting(1, 'a: factor')")[0] + "\nOWN |= {'matrix_lr': 1}\n",
    "postponed annotations": "from __future__ import annotations\n" + field("gain: float = setting(1, 'a: factor')")[0],
}


def tried(data: str | bytes, env: str, folder, name: str = "mine.py") -> str:
    "What is said of a program; empty if nothing is wrong. Anything but a GolfError comes through."
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    try:
        settings_of(file_program(path), dict(word.split("=") for word in env.split())).check()
    except GolfError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_mistake_gets_one_sentence(mistake, tmp_path):
    case, words = MISTAKES[mistake]
    data, env = case if isinstance(case, tuple) else (case, "")
    with pytest.raises(GolfError, match=words) as e:
        raise GolfError(tried(data, env, tmp_path))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("case", FINE)
def test_what_is_odd_and_no_mistake_is_loaded_and_joined(case, tmp_path):
    assert tried(FINE[case], "", tmp_path) == ""
    with contextlib.redirect_stdout(io.StringIO()):
        assert main_cli(["script", str(tmp_path / "mine.py"), "-o", str(tmp_path / "script.py")]) == 0
    compile((tmp_path / "script.py").read_text(), "script", "exec")


@pytest.mark.parametrize("name", ["numbers.py", "random.py", "types.py", "torch.py", "golfnb.py", "3-x y.py"])
def test_a_program_may_be_called_anything(name, tmp_path):
    assert tried(TEXT, "", tmp_path, name) == ""
    import numbers
    assert str(tmp_path) not in str(numbers.__file__) and str(tmp_path) not in sys.path


def test_an_int_for_a_float_is_a_float_from_the_first(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FINE["an int for a float"])
    program = file_program(path)
    for env in ({}, {"GAIN": "1", "MATRIX_LR": "1"}):
        s = settings_of(program, env)
        assert (repr(s.gain), repr(s.matrix_lr)) == ("1.0", "1.0")
    assert settings_of(program, {"GAIN": "0.5"}).gain == 0.5
    again = settings_from(program.Settings, vars(s))
    assert repr(again.gain) == "1.0"


def test_a_command_names_the_line_of_a_program_that_fails(tmp_path, capsys):
    "Where its code runs in this process after it was loaded."
    (tmp_path / "mine.py").write_text(MISTAKES["rules that raise"][0][0])
    status = main_cli(["train", str(tmp_path / "mine.py"), "DATA_PATH=none"])
    said = capsys.readouterr().err
    assert status == 2 and said.count("\n") == 1 and "mine.py line" in said and "ZeroDivisionError" in said
