"""The core is what scripts are made of: it imports neither tools nor studies nor recipes, and a chapter imports earlier ones only."""
import ast
import re
from pathlib import Path

import nbformat
import pytest

from golfnb.tools.programs import RECIPES

ROOT = Path(__file__).resolve().parents[2]
WINGS = ("text", "model", "muon", "run", "file", "score")
REFERENCE = ("settings", "run.run", "model.bank_rule",
             *(f"muon.{name}" for name in ("errors", "jit", "grouping", "owners", "rules", "exchange", "multi_tensor", "state", "optimizer", "recorded", "sharded")))
STORY = ("text.bpb", "text.shards", "text.loader", "text.spans", "model.layers", "muon.newton_schulz", "model.layout", "model.banks", "model.golf", "model.frontier",
         "model.plan", "model.engine", "run.average", "run.train", "model.kernels", "file.grid", "file.quantize", "file.trellis", "file.trellis_file", "file.bits", "file.rans",
         "file.artifact", "score.evaluate", "score.ttt", "score.adapters")
CORE = (*REFERENCE, *STORY)
RESERVED = {"build", "data", "step", "pack", "score", "main", "Parts", "Settings", "OWN", "CODEC", "ADAPT", "PROJECTOR"}  # a program's own names


def file_of(module: str) -> Path:
    return ROOT / "golfnb" / f"{module.replace('.', '/')}.py"


def tree_of(module: str) -> ast.Module:
    return ast.parse(file_of(module).read_text(encoding="utf-8"))


def imported(n: ast.ImportFrom, module: str) -> str:
    "The module of ours that an import in `module` takes from, without golfnb in front; empty for another package's."
    if not n.level:
        return (n.module or "").removeprefix("golfnb.") if (n.module or "").startswith("golfnb.") else ""
    folders = module.split(".")[:-1]
    return ".".join([*folders[:len(folders) - n.level + 1], *filter(None, [n.module])])


def imports(module: str) -> set[str]:
    "Modules of ours that a module imports, anywhere in it, without golfnb in front."
    found = set()
    for n in ast.walk(tree_of(module)):
        if isinstance(n, ast.ImportFrom):
            origin = imported(n, module)
            inside = {f"{origin}.{a.name}" for a in n.names if file_of(f"{origin}.{a.name}").is_file()}  # `from ..run import run`
            found |= inside or {origin}
    return found - {""}


def chapter_of(module: str) -> str:
    "The name of the notebook of a module, without its number."
    return module.split(".")[-1]


def test_the_core_is_these_files():
    own = ("__init__", "__main__", "_modidx", "train_gpt", *(f"{wing}.__init__" for wing in WINGS))
    folders = (ROOT / "golfnb", *(ROOT / "golfnb" / wing for wing in WINGS))
    paths = [path.relative_to(ROOT / "golfnb").with_suffix("") for folder in folders for path in folder.glob("*.py")]
    assert {".".join(path.parts) for path in paths} == {*CORE, *own}
    for folder, modules in (("story", STORY), ("reference", REFERENCE)):
        assert {p.stem.split("_", 1)[1] for p in (ROOT / "nbs" / folder).glob("*.ipynb")} == {*map(chapter_of, modules)}


def test_the_core_imports_itself_alone():
    assert not {(m, i) for m in CORE for i in imports(m) if i not in CORE}


def defined(tree: ast.Module) -> set[str]:
    "Names that a module defines or assigns at its top; what it patches into a class is not among them."
    found = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if not any(ast.unparse(d) == "patch" for d in node.decorator_list):
                found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return found


def word_branches(tree: ast.Module) -> list[str]:
    "Comparisons of an attribute with a text, and matches: what would choose code by a word of the settings."
    found = [ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Match)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        parts = [node.left, *node.comparators]
        texts = [n for part in parts for n in ast.walk(part) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        if texts and any(isinstance(part, ast.Attribute) for part in parts):
            found.append(ast.unparse(node))
    return found


def test_the_recipes_are_the_notebooks_of_their_folder():
    assert sorted(p.stem for p in (ROOT / "nbs" / "recipes").glob("*.ipynb")) == [*RECIPES]
    assert not {(m, i) for m in RECIPES for i in imports(f"recipes.{m}") if i not in CORE}, "a recipe is made of the core alone"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_short_program_without_a_branch_on_a_word(name):
    tree = tree_of(f"recipes.{name}")
    assert defined(tree) >= RESERVED - {"ADAPT", "PROJECTOR"}
    assert word_branches(tree) == []
    lines = (ROOT / "golfnb" / "recipes" / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 100 and not line.startswith("__all__")] == []


def test_a_branch_on_a_word_would_be_found():
    for text in ('if s.clip == "global": pass', 'x = 1 if "ema" in s.averaging else 2', 'if s.loader in ("a", "b"): pass', 'match s.codec:\n    case "lzma": pass'):
        assert len(word_branches(ast.parse(text))) == 1, text
    assert word_branches(ast.parse('if s.ttt_enabled and s.steps == 3: print("x")')) == []


def test_names_of_a_program_are_left_to_programs():
    taken = {(m, name) for m in CORE for name in defined(tree_of(m)) & RESERVED}
    assert taken == set()


def test_a_chapter_of_the_story_imports_earlier_ones():
    at = {m: i for i, m in enumerate(STORY)}
    assert not {(m, i) for m in STORY for i in imports(m) if i in at and at[i] > at[m]}


def test_the_story_is_in_the_order_of_its_numbers():
    numbers = {p.stem.split("_", 1)[1]: p.stem.split("_")[0] for p in (ROOT / "nbs" / "story").glob("*.ipynb")}
    assert [*STORY] == sorted(STORY, key=lambda module: numbers[chapter_of(module)])


@pytest.mark.parametrize("path", sorted((ROOT / "nbs").glob("*/[0-9]*.ipynb")), ids=lambda p: p.stem)
def test_a_chapter_makes_a_module_of_its_folder(path):
    found = [m[1] for c in nbformat.read(path, as_version=4).cells if (m := re.search(r"^#\| default_exp (\S+)$", c.source, re.M))]
    name = path.stem.split("_", 1)[1]
    homes = [m for m in CORE if m.split(".")[-1] == name] if path.parent.name in ("story", "reference") else [f"{path.parent.name}.{name}"]
    assert found == ([] if "_study_" in path.stem else homes)


ORDER = (("muon",), ("settings",), ("text",), ("model",), ("run.average", "run.train"), ("file",), ("score",), ("run.run",), ("recipes",),
         ("tools",), ("studies",), ("tools.cli", "tools.commands", "__main__", "__init__"))  # from below; the command line and the front door over all


def height(module: str) -> int:
    "How high a module lies in ORDER: where its longest name stands."
    found = [(len(name), at) for at, names in enumerate(ORDER) for name in names if f"{module}.".startswith(f"{name}.")]
    return max(found)[1]


def all_imports(text: str, module: str) -> set[str]:
    "Modules of ours that a module's text names: in imports wherever they stand, for editors too, and in calls of `import_module`."
    found = set()
    for n in ast.walk(ast.parse(text)):
        if isinstance(n, ast.ImportFrom) and (n.level or (n.module or "").startswith("golfnb.")):
            origin = imported(n, module)
            inside = {f"{origin}.{a.name}".lstrip(".") for a in n.names if file_of(f"{origin}.{a.name}".lstrip(".")).is_file()}
            found |= inside or {origin}
        elif isinstance(n, ast.Import):
            found |= {a.name.removeprefix("golfnb.") for a in n.names if a.name.startswith("golfnb.")}
        elif isinstance(n, ast.Call) and ast.unparse(n.func).endswith("import_module") and n.args and isinstance(n.args[0], ast.Constant):
            found |= {n.args[0].value.removeprefix("golfnb.")} if n.args[0].value.startswith("golfnb.") else set()
    return found - {""}  # of the package itself its version and its folder are taken, no module


def test_no_import_runs_up():
    paths = [p.relative_to(ROOT / "golfnb").with_suffix("") for p in (ROOT / "golfnb").rglob("*.py") if p.stem not in ("_modidx", "train_gpt")]
    texts = {".".join(p.parts): (ROOT / "golfnb" / p.with_suffix(".py")).read_text(encoding="utf-8") for p in paths}
    assert not {(m, i) for m, text in texts.items() for i in all_imports(text, m) if height(i) > height(m)}


def test_an_import_that_runs_up_would_be_found():
    for text in ("from ..studies.bench import spread", "def f():\n    from ..studies import bench", "import golfnb.studies.bench", "import_module('golfnb.studies.bench')"):
        assert [height(i) > height("tools.report") for i in all_imports(text, "tools.report")] == [True], text
    assert height("run.train") < height("file.quantize") < height("score.ttt") < height("run.run") < height("recipes.golf")
