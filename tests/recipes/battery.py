"""Programs that hold anything Python allows, as `battery.txt` has them, each run as Python runs it and as its script does.

    python tests/battery.py [WORDS OF A TITLE ...]

Each way runs in a child of this process: plain Python, the way golfnb loads a program, the script, the packed script.
Prints a line of JSON for each program: its title, what it came to, and what was said.
"""
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib import invalidate_caches
from pathlib import Path
from types import ModuleType

from golfnb.settings import GolfError
from golfnb.tools.joiner import join_program, pack_program

START = 'if __name__ == "__main__":\n    main()\n'
BYTES = {  # texts that a file of texts cannot hold
    "CRLF, tabs, no last newline": b"X = 1\r\ndef main():\r\n\tprint('''a\r\nb''', X)",
    "a byte order mark": "\ufeffX = 1\ndef main(): print(X, 'é')\n".encode(),
    "a byte order mark and a cookie": "\ufeff# coding: utf-8\nX = 1\ndef main(): print(X, 'é')\n".encode(),
    "latin-1 with a cookie": b"# -*- coding: latin-1 -*-\nX = '\xe9'\ndef main(): print(ascii(X))\n",
    "cp1252 with a cookie in the second line": b"#!/usr/bin/env python\n# vim: set fileencoding=cp1252 :\ndef main(): print(ascii('\x80'))\n",
    "form feeds and odd spaces": "X = 1\n\x0c\ndef main():\n    print(X, 'a\x0cb\x85c\u2028d'.split())\n".encode(),
    "old Macintosh lines": b"X = 1\rdef main(): print(X)\r",
    "a form feed before a function whose source is read": b"import inspect\n\x0c\n# one\x0ctwo\ndef main(): print(inspect.getsource(main))\n",
}


def programs() -> dict[str, dict[str, bytes]]:
    "Title -> name of a file -> its bytes."
    found = {title: {"mine.py": data} for title, data in BYTES.items()}
    for case in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split("=== ")[1:]:
        title, *files = re.split("(?m)^--- ", case)
        texts = dict(file.split("\n", 1) for file in files)
        found[title.strip()] = {name: text.replace("<no newline>\n", "").encode() for name, text in texts.items()}
    return found


def said_by(work: Callable[[], object]) -> str:
    "What a child process prints that does some work; its error, if it ends with one."
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(write, 1)
        os.dup2(write, 2)
        status = 0
        try:
            work()
            sys.stdout.flush()
            import atexit
            atexit._run_exitfuncs()
        except BaseException as e:
            print("ERROR", " ".join(f"{type(e).__name__}: {e}".split()), traceback.format_exc().splitlines()[-3:-1])
            status = 1
        sys.stdout.flush()
        os._exit(status)
    os.close(write)
    with os.fdopen(read) as file:
        said = file.read().strip()
    os.waitpid(child, 0)
    return said[said.find("ERROR") :] if "ERROR" in said else said


def run_plainly(program: Path) -> None:
    "As Python imports a file, its folder before all others."
    sys.path.insert(0, str(program.parent))
    invalidate_caches()
    spec = importlib.util.spec_from_file_location(f"program_{program.stem}", program)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()


def run_script(path: Path) -> None:
    "As Python starts a script."
    os.chdir(path.parent)
    sys.path.insert(0, str(path.parent))
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = str(path)
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)


def verdict(files: dict[str, bytes], folder: Path) -> tuple[str, str]:
    "What a program comes to: same, refused, fails in all forms, or differs; and what was said."
    for name, data in files.items():
        path = folder / "from" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    program = folder / "from" / "mine.py"
    plain = said_by(lambda: run_plainly(program))
    try:
        text = join_program(program, START)
    except GolfError as e:
        return "refused", str(e)
    except Exception as e:
        return "traceback", f"{type(e).__name__}: {e}"
    (folder / "to").mkdir()
    found = []
    for name, code in (("script", text), ("packed", pack_program(text))):
        path = folder / "to" / f"{name}.py"
        path.write_text(code, encoding="utf-8")
        found.append(said_by(lambda path=path: run_script(path)))
    said = f"plainly {plain!r}, script {found[0]!r}, packed {found[1]!r}"
    if plain.startswith("ERROR"):
        return "fails", said
    return "same" if {plain} == {*found} else "differs", said


def main(words: list[str]) -> None:
    sys.dont_write_bytecode = True
    for title, files in programs().items():
        if all(word in title for word in words):
            folder = Path(tempfile.mkdtemp()).resolve()  # a TemporaryDirectory would be removed by each child
            kind, said = verdict(files, folder)
            shutil.rmtree(folder)
            print(json.dumps({"title": title, "kind": kind, "said": said}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
