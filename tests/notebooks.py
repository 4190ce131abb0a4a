"""Run notebooks top to bottom and keep their outputs honest.

    python tests/notebooks.py run [NB ...]     execute, clean, write the outputs back
    python tests/notebooks.py check [NB ...]   execute, and fail where a kept text output is not what the code prints
    python tests/notebooks.py text [NB ...]    notebooks as editable text: nbs/X.ipynb -> .text/X.py (jupytext, py:percent)
    python tests/notebooks.py sync [NB ...]    and back: .text/X.py -> nbs/X.ipynb (outputs kept) -> golfnb/X.py, then `run`

Several notebooks run in parallel; each in a kernel with one thread and a fixed hash seed, forked from a process that has imported torch.
"""
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import nbformat
import exported
from forked import fork_kernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbdev.clean import clean_nb
from nbdev.export import nb_export
from tiny import known_names

ROOT = Path(__file__).resolve().parent.parent
NBS, TEXT = ROOT / "nbs", ROOT / ".text"
MAX_BYTES = 200_000
HANG_SECONDS = 900  # no cell takes nearly as long, on no machine
PROCESSOR_SECONDS = "import os; print(sum(os.times()[:4]))"  # of a kernel and of the processes that it waited for
VOLATILE = re.compile(r"0x[0-9a-f]{6,}|data:image/png;base64,[\w+/=]+")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT), "MPLBACKEND": "module://matplotlib_inline.backend_inline", "COLUMNS": "100"}


class LostMessage(Exception):
    "A kernel printed, and nothing came: seen rarely, on a busy machine."


def execute(path: Path) -> tuple[nbformat.NotebookNode, float]:
    "The executed notebook and its processor seconds, which other work on the machine leaves alone; cells marked `#| eval: false` are shown and not run."
    nb = nbformat.read(path, as_version=4)
    held = {i: c for i, c in enumerate(nb.cells) if c.cell_type == "code" and re.search(r"^#\|\s*eval:\s*false", c.source, re.M)}
    for i in held:
        nb.cells[i] = nbformat.v4.new_raw_cell("")
    nb.cells.append(nbformat.v4.new_code_cell(PROCESSOR_SECONDS))
    NotebookClient(nb, timeout=HANG_SECONDS, startup_timeout=HANG_SECONDS, iopub_timeout=HANG_SECONDS, kernel_name="python3", coalesce_streams=True, extra_arguments=["--log-level=ERROR"], resources={"metadata": {"path": str(path.parent)}}).execute()
    last = nb.cells.pop().outputs
    printed = "".join(output.get("text", "") for output in last).split()  # may come in pieces, or not at all
    if not printed:
        raise LostMessage
    seconds = float(printed[-1])
    for i, cell in held.items():
        nb.cells[i] = cell
    return nb, seconds


def clean(nb: nbformat.NotebookNode) -> nbformat.NotebookNode:
    "What nbdev_clean leaves, without warnings and what the machine says of its outputs."
    clean_nb(nb)
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
            for out in cell.outputs:
                out.update({"metadata": {}} if "metadata" in out else {})
    return nb


def text_outputs(nb: nbformat.NotebookNode) -> list[str]:
    "The text a reader sees, cell by cell (pictures are not compared)."
    rows = []
    for cell in nb.cells:
        parts = []
        for out in cell.get("outputs", ()):
            if out.output_type == "stream":
                parts.append(out.text)
            elif "image/png" not in out.get("data", {}):
                shown = next((k for k in ("text/markdown", "text/html") if k in out.get("data", {})), "text/plain")  # a table's own text, not "<Markdown object>"
                parts.append(out.get("data", {}).get(shown, ""))
        rows.append(VOLATILE.sub("0x", "".join(parts)))
    return rows


def every_notebook() -> list[Path]:
    "All notebooks of the book; `start`, which takes longest, first."
    found = [p for p in NBS.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts]
    return sorted(found, key=lambda p: p.stem, reverse=True)


def stated_seconds(nb: nbformat.NotebookNode) -> int | None:
    "What a chapter says it takes on one idle core."
    found = re.search(r"CPU run time of this (?:chapter|lesson): about (\d+) s\.", "\n".join(c.source for c in nb.cells if c.cell_type == "markdown"))
    return int(found[1]) if found else None


def untrue_seconds(stated: int, seconds: float) -> bool:
    "Whether a statement is false by more than a slow machine explains."
    return seconds > 6 * stated + 15 or stated > 4 * seconds + 5


def one(path: Path, write: bool) -> str | None:
    "Run one notebook, and once more if it is not in order: what a kernel prints may be lost once."
    return attempt(path, write) and attempt(path, write)


def stale_sentence(name: str, cell: int, kept: str, now: str) -> str:
    "What differs: both outputs from a little before the first place where they do."
    same = len(os.path.commonprefix([kept, now]))
    begin = max(0, same - 80)
    line = kept.count("\n", 0, same) + 1
    shown = [f"{'...' if begin else ''}{text[begin:same + 320]!r}" for text in (kept, now)]
    return f"{name}: kept output of cell {cell} is stale from its line {line} on\n  kept: {shown[0]}\n  now:  {shown[1]}"


def attempt(path: Path, write: bool) -> str | None:
    "Run one notebook; None when it is in order, else the sentence that says why not."
    try:
        done, seconds = execute(path)
    except CellExecutionError as e:
        return f"{path.name}: a cell failed:\n{e}"
    except LostMessage:
        return f"{path.name}: what its last cell printed did not come"
    done = clean(done)
    print(f"  {path.name:28s} {seconds:5.1f} s", flush=True)
    if (stated := stated_seconds(done)) and untrue_seconds(stated, seconds):
        return f"{path.name}: says it takes about {stated} s, took {seconds:.0f} s of the processor; correct the sentence"
    kept = text_outputs(nbformat.read(path, as_version=4))
    if write:
        nbformat.write(done, path)
    if path.stat().st_size > MAX_BYTES:
        return f"{path.name}: {path.stat().st_size:,} bytes, at most {MAX_BYTES:,} are allowed: fewer or smaller pictures"
    stale = [(i, a, b) for i, (a, b) in enumerate(zip(kept, text_outputs(done))) if a != b and not write]
    said = [stale_sentence(path.name, *found) for found in stale]
    if said:
        said.append(f"  run: python tests/notebooks.py run {path.relative_to(ROOT)}")
    return "\n".join(said) or None


def jupytext(*argv: str | Path) -> None:
    TEXT.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-m", "jupytext", "--quiet", *map(str, argv)], check=True, cwd=ROOT)


def from_text(path: Path) -> None:
    "The notebook from its text, and the module from the notebook."
    jupytext("--to", "ipynb", "--update", "-o", path, TEXT / f"{path.stem}.py")
    nbformat.write(clean(nbformat.read(path, as_version=4)), path)
    nb_export(path, lib_path=str(ROOT / "golfnb"))
    exported.rewrite(ROOT / "golfnb")


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in ("run", "check", "text", "sync"):
        print(__doc__)
        return 2
    paths = [Path(a).resolve() for a in argv[1:]] or every_notebook()
    for path in paths if argv[0] in ("text", "sync") else ():
        jupytext("--to", "py:percent", "-o", TEXT / f"{path.stem}.py", path) if argv[0] == "text" else from_text(path)
    if argv[0] == "text":
        return 0
    for name in known_names():  # what a user has set for runs of their own is not of the book
        os.environ.pop(name, None)
    os.environ.update(ENVIRONMENT)
    vars(sys.modules["__main__"]).pop("__file__", None)  # else each fork imports this file
    at_once = 1 + (os.cpu_count() or 1)  # while one kernel starts or ends, the others have work for every core
    with ThreadPoolExecutor(at_once) as pool, patch("jupyter_client.provisioning.local_provisioner.launch_kernel", fork_kernel):
        problems = [p for p in pool.map(lambda q: one(q, argv[0] != "check"), paths) if p]
    for p in problems:
        print(p, file=sys.stderr)
    print(f"{len(paths) - len(problems)} of {len(paths)} notebooks in order")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
