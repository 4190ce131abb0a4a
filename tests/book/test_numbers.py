"""No figure with a unit is typed by hand: what prose, comments and strings say in ms, s, bpb, nats, bytes, tokens/s, FLOP/s or %
is either printed by code from nbs/results, or stands in ALLOWED with its source."""
import io
import json
import math
import re
import tokenize
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch

from golfnb.model.layout import bank_per_shape
from golfnb.model.golf import Golf
from golfnb.recipes import pr549
from golfnb.tools.programs import settings_of

NBS = Path(__file__).resolve().parents[2] / "nbs"
NUMBER = r"(?<![\w.,:])(?<![A-Za-z]-)(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:e-?\d+)?"
UNIT = (r"(?:ms|us|µs|ns|s|seconds?|minutes?|min|hours?|bpb|bits(?: per byte)?|nats?|bytes?|[kKMG]i?B|[kMGT]B/s|tokens/s|tokens a second|[MGTP]FLOPs?(?:/s)?|"
        r"%|per ?cent|milliseconds?|microseconds?|gigabytes?|megabytes?)")
FIGURE = re.compile(rf"{NUMBER}(?:\s*(?:to|and|or|-|±|\+-)\s*{NUMBER})?[\s\u00a0]?{UNIT}(?![\w/-])")
HEADED = re.compile(r"\b(?:ms|s|bpb|nats?|bytes|MB|GB|%|TFLOP)\b")

RULES = {"16,000,000 bytes", "600 seconds", "600 s", "10 minutes", "0.005 nats"}  # openai/parameter-golf, README: the size, the times, the margin of a record
PUBLISHED = {  # figures of the published table, as nbs/results/published.json has them: number -> where it was published
    f"{figure:{form}}": run["run"] for facts in [json.loads((NBS / "results" / "published.json").read_text())["facts"]] for run in [*facts["rows"], facts["best"]]
    for key, form in (("step_ms", ".2f"), ("step_ms", ".1f"), ("steps", ","), ("bpb", ".4f"), ("bytes", ",")) for figure in run[key]
}
WORKED = "## Numbers to work out"  # what is given there is what a reader reckons with; hidden tests hold the results
ALLOWED = [  # chapter, words as they stand, source; a source that begins with "=" is computed and must give the figure
    ("pr2135", "The band is 0.004 nats", "a bound that was chosen before the runs"),
    ("one", "One card of 24 GB", "the size that the page is about"),
    ("one", "for one with 24 GB, an RTX", "the same size"),
    ("20_data", "its first 8 kB", "the rule of the cell: as much as is looked at"),
    ("24b", "as a reader of a clock says them: 45 s", "example of a form"),
    ("24b", "at 125 ms a step", "an invented run, from the cell"),
    ("20d_corpus", "(20,000 bytes are enough)", "the rule of the cell below, held by test_data"),
    ("golfnb_data", "at least 20 kB of text and at most 2 MB", "the rule of chapter 20d"),
    ("lesson10", "with weights of 32 bits each", "definition of float32"),
    ("lesson01", "how probable each of the 256 bytes is", "= 2 ** 8"),
    ("lesson01", "were worth 4 % and 17 % of a score", "published: mistakes in submissions to the challenge, PRs #1271 and #1804"),
    ("01", "costs 8 bits a byte", "definition of a byte"),
    ("01", "are the 256 bytes", "= 2 ** 8"),
    ("01", "were worth 4 % of a score", "published: mistakes in submissions to the challenge"),
    ("01", "and 17 % (every space counted twice: PR #1804)", "published: mistakes in submissions to the challenge"),
    ("02", "1,024 bytes a shard", "= 256 * 4"),
    ("02", "are 200,001,024 bytes", "= 2 * 100_000_000 + 1024"),
    ("02", "needs 10 bits a token", "= 1024 .bit_length() - 1"),
    ("02", "just over 4 GiB", "name of a planted fault: the size of the file is set in the cell"),
    ("02", "| bytes |", "format: offsets in a shard's header"),
    ("02b", "1/e of them, 37 %", "= round(100 * math.exp(-1))"),
    ("03", "bfloat16: 8 bits of mantissa", "definition of bfloat16, the leading one counted"),
    ("03", "the capped logits to 16 bits", "definition of bfloat16"),
    ("09", "start on 16 bytes each", "definition: what the card's bulk copies ask for"),
    ("10", "its weights take 32 bits each", "definition of float32"),
    ("07", "a whole optimizer step of 1.3 milliseconds (PR #399)", "published: PR #399"),
    ("08", "keep at most 1 % of its initial weights", "given in an exercise"),
    ("07b", "scalars are 4 % of the weights", "= small_share()"),
    ("07b", "to 16 bytes", "definition: a vector load"),
    ("07b", "the published table: 4 ms slower", "published: PR #399"),
    ("07b", "or 40 s with several nodes, raises", "choice: beside the 14 s it takes at most to ask who is gone, under a minute"),
    ("21b", "takes up to 14 seconds", "choice: the limit is in the code below"),
    ("16", "a minute (40 seconds between nodes)", "choice: chapter 07b has it"),
    ("08b", "a cap of 50 seconds at 100 ms a step", "settings of the example in the next cell"),
    ("08b", "a counter that gains 10 ms a step", "settings of the example in the next cell"),
    ("10b", "in memory, 32 bits each", "definition of float32"),
    ("10e", "95 % bootstrap intervals", "definition of the interval"),
    ("10e", "stays within 0.255 bits a weight of the limit", "published: arXiv 2603.04956"),
    ("10b", "under about 0.25 bits", "= 0.25"),
    ("11", "stays under 32 bits", "definition of the coder's state"),
    ("11", "its low 16 bits go out", "definition of the coder's word"),
    ("10b", "and 0.03 bits a weight for the scales", "= round(16 / 512, 2)"),
    ("11b", "checksum 32 bytes of the header", "format: two comments of constants, one after the other"),
    ("11b", "or to 32 MiB if that is more", "= 2 ** 25 // 2 ** 20"),
    ("20", "The first 8 bytes of a SHA-256", "definition of the split"),
    ("20", "a vocabulary that 16 bits do not hold", "definition: a shard's tokens are uint16"),
    ("26", "smaller than a model of 16 MB", "rule: the challenge's size, rounded"),
    ("28", "int6+lzma: 39 bytes", "planted fault in a log"),
    ("28", "int6+lzma: 15990000 bytes", "planted fault in a log"),
    ("20", "then the 256 bytes", "= 2 ** 8"),
    ("30", "or below 2 %, is noise", "rule of the comparison: NOISE in the cell"),
    ("36", "bytes within 3 %", "rule of parity: the bound in the cell"),
    ("28", "NVIDIA H100 80GB HBM3", "name of a device"),
    ("36", "is it under 2 %?", "given in an exercise"),
    ("37", "98,304 tokens every 80 milliseconds or so", "published: the reference's step, nbs/results/reference_pr549.json, rounded"),
    ("37", "95 % bound", "definition of the interval"),
    ("37", "half width of the 95 % interval", "definition of the interval"),
    ("37", "95 % within", "definition of the interval"),
    ("37", "differ by 0.004 nats on average", "given in an exercise"),
    ("37", "until the 95 % interval leaves zero out", "given in an exercise"),
    ("index", "[01 bpb]", "name of a chapter"),
]


def small_share() -> int:  # per cent
    "What part of recipe pr549's weights is in no bank."
    s = settings_of(pr549, {})
    layout = bank_per_shape(s, 1)
    whole = sum(p.numel() for p in Golf(s, layout, dtype=torch.bfloat16, device="meta").parameters())
    return round(100 * (1 - sum(m.rows * m.cols for _, _, m in layout) / whole))


def prose(cell) -> str:
    "What a cell says to a reader in its author's own digits: markdown without code blocks; of code, comments and the fixed parts of strings."
    if cell.cell_type == "markdown":
        return re.sub(r"```.*?```", "", cell.source, flags=re.S)
    kept = [t.string for t in tokenize.generate_tokens(io.StringIO(cell.source).readline) if t.type in (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))]
    return "\n".join(re.sub(r"\{[^{}]*\}", "{}", text) for text in kept)


def table_figures(text: str) -> list[tuple[str, str]]:
    "(number, head) of the cells of markdown tables whose column is headed by a unit."
    found, head = [], None
    for line in text.splitlines():
        cells = [c.strip() for c in line.strip().strip("|").split("|")] if line.strip().startswith("|") else None
        if cells is None or head is None:
            head = cells
        else:
            found += [(m[0].rstrip(","), h) for h, c in zip(head, cells) if HEADED.search(h) for m in re.finditer(NUMBER, c)]
    return found


def figures(name: str, cells) -> list[str]:
    "The figures of a notebook that have no source: one line each."
    entries, lost = [(words, source) for chapter, words, source in ALLOWED if name.startswith(chapter)], []
    for cell in cells:
        if cell.source.startswith(WORKED):
            break
        if cell.cell_type not in ("markdown", "code"):
            continue
        text = " ".join(prose(cell).replace("# ", " ").split()) if cell.cell_type == "code" else " ".join(prose(cell).split())
        text = re.sub(r"CPU run time of this (?:chapter|lesson): about \d+ s\.", "", text)  # tests/notebooks.py holds it
        for m in FIGURE.finditer(text):
            near = text[max(0, m.start() - 100): m.end() + 100]
            if m[0] not in RULES and not any(m[0] in words and words in near for words, _ in entries):
                lost.append(f"{name}: {m[0]!r} in ...{text[max(0, m.start() - 50): m.end() + 30]}...")
        if cell.cell_type == "markdown":
            lost += [f"{name}: {number!r} in a table under {head!r}" for number, head in table_figures(cell.source)
                     if number not in PUBLISHED and not any(words == f"| {head} |" for words, _ in entries)]
    return lost


@pytest.mark.parametrize("path", sorted(NBS.rglob("*.ipynb")), ids=lambda p: p.stem)
def test_every_figure_has_a_source(path):
    lost = figures(path.stem, nbformat.read(path, as_version=4).cells)
    if path.parent.name == "answers":
        lost = []  # worked arithmetic: hidden tests hold its results
    assert not lost, "\n".join([*lost, "print it from nbs/results, or name its source in ALLOWED"])


def test_no_entry_is_stale_and_what_is_computed_is_right():
    text = {p.stem: " ".join(" ".join(prose(c).replace("# ", " ") if c.cell_type == "code" else prose(c) for c in nbformat.read(p, as_version=4).cells if c.cell_type != "raw").split()) for p in NBS.rglob("*.ipynb")}
    for chapter, words, source in ALLOWED:
        assert any(words in t for n, t in text.items() if n.startswith(chapter)), f"{chapter}: {words!r} is said no more; take it out of ALLOWED"
        if source.startswith("="):
            told = [float(x.replace(",", "")) for x in re.findall(r"\d[\d,]*(?:\.\d+)?", words)]
            assert any(abs(eval(source[1:], {"math": math, "np": np, "small_share": small_share}) - x) < 1e-9 for x in told), (chapter, words, source)


def test_a_typed_figure_is_found():
    "The scan can fail: prose, a comment, a string, the fixed part of an f-string and a table, each with a figure of nobody."
    def cell(kind, source):
        return nbformat.v4.new_markdown_cell(source) if kind == "m" else nbformat.v4.new_code_cell(source)
    planted = [("m", "A step takes 83.5 ms."), ("m", "It gains 12 to 15 % here."), ("c", "x = 1  # costs 3 GB/s"), ("c", "print('we reach 1.09 bpb')"), ("c", "print(f'{x} of 7,000 bytes')"), ("m", "| a | ms |\n|---|---|\n| b | 12.5 |")]
    for kind, source in planted:
        assert len(figures("99_x", [cell(kind, source)])) == 1, source
    for kind, source in [("m", "Chapter 08 shows 3 banks."), ("c", "print(f'{ms:.1f} ms')"), ("m", "```\n12 ms\n```"), ("m", "At most 16,000,000 bytes.")]:
        assert not figures("99_x", [cell(kind, source)]), source
