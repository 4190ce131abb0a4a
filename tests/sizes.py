"""Print how large things are, for whoever wonders what has grown: `python tests/sizes.py`. Growth is no fault.

Words of a chapter's prose; syntax nodes, without docstrings, and definitions of recipes, joiner and script.
"""
import ast
import re
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def words_of_prose(notebook: Path) -> int:
    "Words of the text cells, code in them aside."
    cells = nbformat.read(notebook, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return len(re.sub(r"```.*?```", "", text, flags=re.S).split())


def nodes_and_definitions(source: str) -> tuple[int, int]:
    "How many syntax nodes a program has, its docstrings aside, and how many functions and classes."
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, *DEFINITIONS)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    nodes = [node for node in ast.walk(tree) if not isinstance(node, ast.expr_context)]
    return len(nodes), sum(isinstance(node, DEFINITIONS) for node in nodes)


def main() -> None:
    chapters = {path.stem: words_of_prose(path) for path in sorted((ROOT / "nbs").glob("*/*.ipynb"))}
    print(f"words of prose: {sum(chapters.values()):,}; " + ", ".join(f"{name} {n:,}" for name, n in chapters.items()))
    programs = [*sorted((ROOT / "golfnb" / "recipes").glob("[!_]*.py")), ROOT / "golfnb/tools/joiner.py", ROOT / "golfnb/train_gpt.py"]
    for path in programs:
        nodes, definitions = nodes_and_definitions(path.read_text(encoding="utf-8"))
        print(f"{path.relative_to(ROOT)}: {nodes:,} nodes, {definitions} definitions")


if __name__ == "__main__":
    main()
