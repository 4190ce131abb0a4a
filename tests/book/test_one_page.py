"Every public name has one page that defines it; who looks a function or a class up by its name finds one."
import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

import nbformat
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "book"))
import names
import sources

PUBLIC = re.compile(r"^#\|\s*exports?\s*$", re.M)


def defined(source: str) -> set[str]:
    "The names that a cell defines at its top."
    nodes = ast.parse(re.sub(r"(?m)^[!%].*", "", source)).body
    found = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    stored = [x for n in nodes if isinstance(n, (ast.Assign, ast.AnnAssign)) for x in ast.walk(n) if isinstance(x, ast.Name)]
    return found | {x.id for x in stored if isinstance(x.ctx, ast.Store)}


def pages_of(notebooks: dict[str, list]) -> dict[tuple[str, str], list[str]]:
    "(module, name) -> the pages whose exported cells define it, from the cells of each."
    found = defaultdict(list)
    for stem, cells in notebooks.items():
        code = [c.source for c in cells if c.cell_type == "code"]
        modules = re.findall(r"^#\| default_exp (\S+)", "\n".join(code), re.M)
        for source in code if modules else ():
            for name in sorted(defined(source)) if PUBLIC.search(source) else ():
                found[modules[0], name].append(stem)
    return found


@pytest.fixture(scope="module")
def pages() -> dict:
    return pages_of({stem: sources.notebook(stem).cells for stem in sources.stems()})


def test_every_public_name_has_exactly_one_page_and_the_site_has_it(pages):
    listed = {stem for _, group in sources.parts() for stem in group}
    for module in names.modules().values():
        assert module.chapter in listed, f"{module.name}: no part of the site lists its page"
        for n in module.public:
            assert pages[module.name, n.name] == [module.chapter], f"golfnb.{module.name}.{n.name}"


def test_a_page_says_what_its_functions_and_classes_are(pages):
    for module in names.modules().values():
        prose = "\n".join(c.source for c in sources.notebook(module.chapter).cells if c.cell_type == "markdown")
        silent = [n.name for n in module.public if n.kind != "data" and not n.doc and not re.search(rf"\b{n.name}\b", prose)]
        assert silent == [], f"golfnb.{module.name}: write a docstring, or name them in the page's prose"


def shared(modules) -> dict[str, list[str]]:
    "Functions and classes that several modules offer under one name -> their modules."
    homes = defaultdict(list)
    for module in modules:
        for n in module.public:
            if n.kind in ("function", "class"):
                homes[n.name].append(module.name)
    return {name: found for name, found in homes.items() if len(found) > 1}


def test_no_function_or_class_shares_its_name_with_one_of_another_page():
    assert shared(names.modules().values()) == {}, "give one another name, or export it with `#| exporti`: it is no name that others look up"


def test_each_of_these_can_fail():
    cell = nbformat.v4.new_code_cell
    code = [cell("#| default_exp a"), cell("#| exports\ndef go(): pass"), cell("#| exporti\nX = 1"), cell("#| export\nY = 2")]
    assert pages_of({"01_a": code, "02_a": code[:2]}) == {("a", "go"): ["01_a", "02_a"], ("a", "Y"): ["01_a"]}
    twins = [names.Module(m, m, "", {"go": names.Name("go", "function")}, set()) for m in ("a", "b")]
    assert shared(twins) == {"go": ["a", "b"]} and shared(twins[:1]) == {}
