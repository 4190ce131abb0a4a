"""The lists that helps of the command line print, written when the modules are: their sources import torch, a help does not.

    python tests/helps.py FOLDER SCRIPT    train.txt, recipes.txt, bench.txt and study.txt in the helps of the package's folder,
                                           and the script of pr549, in the same process: torch is imported once
"""
import sys
from pathlib import Path

from golfnb import settings
from golfnb.studies.bench import BENCHES, bench_function
from golfnb.studies.harness import STUDIES
from golfnb.tools.cli import main_cli
from golfnb.tools.programs import RECIPES, recipe_program, setting_groups


def setting_line(spec) -> str:
    "A setting with its default and meaning."
    line = f"  {f'{spec.name.upper()}={spec.default}':42s} {spec.metadata['meaning']}"
    if spec.metadata["choices"]:
        line += f" ({', '.join(spec.metadata['choices'])})"
    return line


def with_bases(group: type) -> list[type]:
    "A class and what it derives from, each followed by its own bases."
    found = [group]
    for base in group.__bases__:
        found += with_bases(base)
    return found


def settings_list() -> str:
    "Every setting of a recipe once, under the chapter where it acts, with default and meaning."
    lines = [f"recipes: {', '.join(RECIPES)}; a program of your own: its file",
             "settings, by chapter; what a recipe sets otherwise is OWN in `golfnb recipe show NAME`,",
             "what a program of your own adds is in its Settings:"]
    groups = {}
    for name in ("pr549", *RECIPES):
        program = recipe_program(name)
        declared = setting_groups(program)
        groups |= {group: declared[group] for group in with_bases(program.Settings) if group in declared}
    for group, specs in groups.items():
        module = group.__module__.removeprefix("golfnb.")
        lines += [f"\n{module} ({group.__name__})", *map(setting_line, specs)]
    also = ", ".join((*settings.PUBLISHED, *settings.IGNORED, *settings.NOT_BUILT))
    return "\n".join([
        *lines,
        "\nCHECKPOINT_EVERY_S=60: seconds between checkpoints; 0: none",
        "OMP_NUM_THREADS: threads of each CPU rank (default: its share of the cores idle at the start)",
        f"words of published command lines, accepted where they are true of the recipe: {also}"])


def listing(functions: dict) -> str:
    "Name and docstring of each function."
    return "\n".join(f"  {name:13s}{function.__doc__ or 'variants side by side'}" for name, function in functions.items())


def write(package: Path) -> None:
    "All lists."
    texts = {"train": settings_list(),
             "recipes": "\n".join(f"{name:8s}{recipe_program(name).__doc__}" for name in RECIPES),
             "bench": listing({what: bench_function(what) for what in BENCHES}), "study": listing(STUDIES)}
    folder = package / "tools" / "helps"
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    raise SystemExit(main_cli(["script", "--recipe", "pr549", "-o", sys.argv[2]]))
