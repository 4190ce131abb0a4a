"""The moving figures: their modules compute what the library computes, each control moves the marks to Python's numbers, and without scripts there is a picture."""
import json
import random
import re
import sys
from dataclasses import asdict
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
import torch

from golfnb.file.grid import dequantize_rows, quantize_rows, round_to_grid, row_clip, row_scale
from golfnb.model.layout import LayoutSettings, Matrix, bank_named, bank_per_shape, group_matrices, slots_of
from golfnb.model.plan import CommSchedule, Event, MachineModel, comm_schedule, finish_us, predict
from golfnb.file.quantize import entropy_bits, gptq_columns, hessian_factor
from golfnb.settings import GolfError
from golfnb.tools import figures

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "book"))
from browse import FLAGS, find_chromium

SCREENS = [(1280, "light"), (390, "dark")]


@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="the figures are driven with playwright")
    if not find_chromium():
        pytest.skip("no Chromium here to run the figures in")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        yield browser
        browser.close()


def opened(chromium, folder: Path, figure: figures.MovingFigure, width: int = 1280, scheme: str = "light", **more):
    "A tab with one figure on a page of its own, and the list of what goes wrong there."
    page, wrong = folder / "page.html", []
    head = '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
    page.write_text(f'{head}<body style="margin: 20px; font-family: sans-serif">{figure.html}', encoding="utf-8")
    tab = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **more).new_page()
    tab.on("console", lambda m: wrong.append(m.text))
    tab.on("pageerror", lambda e: wrong.append(str(e)))
    tab.on("request", lambda r: wrong.append(r.url) if not r.url.startswith((page.as_uri(), "data:")) else None)
    tab.goto(page.as_uri())
    return tab, wrong


def module(chromium, name: str):
    "A tab in which `window.figure` is the module."
    tab = chromium.new_page()
    tab.goto("about:blank")
    tab.evaluate("async text => { window.figure = await import(URL.createObjectURL(new Blob([text], {type: 'text/javascript'}))); }", figures.module_text(name))
    return tab


def press(tab, name: str, key: str, times: int = 1) -> None:
    "Keys on a slider, which has the focus and shows it."
    tab.focus(f"input[name={name}]")
    for _ in range(times):
        tab.keyboard.press(key)
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def letters(tab) -> float:
    "The smallest letters of the page, in pixels on the screen."
    return tab.evaluate("""Math.min(...[...document.querySelectorAll('.golf-figure *')].filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) && !e.closest('script'))
      .map(e => parseFloat(getComputedStyle(e).fontSize) * (e.ownerSVGElement ? e.ownerSVGElement.getScreenCTM().a : 1)))""")


def test_a_notebook_shows_the_figure_that_its_module_makes():
    found = []
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            for out in cell.get("outputs", ()):
                text = out.get("data", {}).get("text/html", "")
                for name in re.findall(r'data-figure="(\w+)"', text):
                    found.append((name, path.stem))
                    assert figures.module_text(name) in text, f"{path.name}: run tests/notebooks.py run {path}"
    assert {name for name, _ in found} == {p.stem for p in (ROOT / "nbs" / "figures").glob("*.js")} - {"parts"}


def test_a_module_asks_nothing_of_the_network():
    for path in (ROOT / "nbs" / "figures").glob("*.js"):
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|\bfetch\(|XMLHttpRequest|import\(|</script", text), path.name
        assert re.findall(r'^import .* from "(.*)";$', text, re.M) == ([] if path.stem == "parts" else ["./parts.js"])


def test_a_figure_that_does_not_exist_is_refused():
    with pytest.raises(GolfError, match=r"none\.js and parts\.js must lie in"):
        figures.figure("none", {}, plt.figure(), "nothing")


# the schedule

def random_case(seed: int) -> tuple:
    "A layout, links with or without their refinements, and the options of `predict`."
    r = random.Random(seed)
    names = [f"bank{i}_bank" for i in range(r.randint(1, 5))]
    shapes = {name: (r.choice((64, 256, 512)), r.choice((64, 512, 1536))) for name in names}
    layout = group_matrices([Matrix(f"{b}.{i}.weight", *shapes[b], b, transposed=r.random() < 0.5 and len(set(shapes[b])) == 1) for b in names for i in range(r.randint(1, 30))], r.randint(1, 32))
    kinds = {kind: [r.uniform(1, 50), r.uniform(10, 500)] for kind in ("scatter", "gather", "all-reduce") if r.random() < 0.4}
    update = {f"{min(s)}x{max(s)}": [r.uniform(10, 90), r.uniform(1, 30)] for s in shapes.values() if r.random() < 0.3}
    links = MachineModel(r.uniform(0, 100), r.uniform(5, 900), r.uniform(10, 500), r.uniform(0, 20), kinds, update, r.choice((0.0, r.uniform(500, 4000))), r.choice((0.0, r.uniform(1, 300))), (r.uniform(1, 90), r.uniform(5, 90)))
    options = {"small_bytes": r.choice((0, r.randint(1, 9_000_000))), "clip": r.choice(("local", "global")), "stacked": r.random() < 0.5, "nodes": r.choice((1, 1, 2, 8)), "two_level": r.random() < 0.5}
    orders = [tuple(r.sample(names, len(names))) for _ in range(2)]
    return layout, links, options, orders


def banks_of(layout) -> list[dict]:
    return [{"name": b.name, "shape": b.matrices[0].stored, "matrices": [m.name for m in b.matrices]} for b in layout.banks]


def same(events: list[Event], marks: list[dict]) -> bool:
    "Whether JavaScript's events are Python's, names in order and times to 1e-9."
    assert [(e.name, e.stream) for e in events] == [(f"{m['what']} {m['of']}", m["stream"]) for m in marks]
    pairs = [pair for e, m in zip(events, marks) for pair in ((e.start_us, m["start"]), (e.end_us, m["end"]))]
    return all(abs(ours - theirs) <= 1e-9 * max(1, abs(ours)) for ours, theirs in pairs)


def test_the_port_of_predict_gives_its_numbers_in_250_random_cases(chromium):
    given, wanted = [], []
    for seed in range(250):
        layout, links, options, (scatter, work) = random_case(seed)
        banks = {b["name"]: b for b in banks_of(layout)}
        named = {**options, "smallBytes": options["small_bytes"], "twoLevel": options["two_level"]}
        given.append({"banks": [*banks.values()], "step": [[banks[n] for n in scatter], [banks[n] for n in work], layout.world, asdict(links), named]})
        wanted.append((predict(CommSchedule(scatter, work), layout, links, **options), [[*comm_schedule(layout, order).work] for order in ("big_first", "small_first")]))
    found = module(chromium, "schedule").evaluate("""given => given.map(({banks, step}) =>
        [figure.predict(...step), ["big_first", "small_first"].map(order => figure.commOrder(banks, order).map(b => b.name))])""", given)
    for (events, orders), (marks, ordered) in zip(wanted, found, strict=True):
        assert same(events, marks) and orders == ordered


def waited(events: list[Event], us: float) -> float:
    return us - sum(min(e.end_us, us) - min(e.start_us, us) for e in events if e.stream == "gpu")


def padded(layout, events: list[Event], rank: int, us: float) -> float:
    found = 0.0
    for event in events:
        if event.name.startswith("work "):
            slots = slots_of(bank_named(layout, event.name.split()[1]), rank)
            found += slots.count(None) / len(slots) * (min(event.end_us, us) - min(event.start_us, us))
    return found


def test_every_arrangement_and_every_wait_in_200_random_cases(chromium):
    given, wanted = [], []
    for seed in range(200):
        layout, links, options, _ = random_case(seed)
        r = random.Random(seed)
        links = MachineModel(links.latency_us, links.bandwidth_gbytes_per_s, links.ns_tflops, links.launch_us)
        order, in_turn, single, part, rank = r.choice(("big_first", "small_first")), r.random() < 0.5, r.random() < 0.5, r.random(), r.randrange(layout.world)
        data = {"banks": banks_of(layout), "links": {"ns_tflops": links.ns_tflops}, "small_bytes": options["small_bytes"]}
        state = {"ranks": layout.world, "gbytes": links.bandwidth_gbytes_per_s, "latency": links.latency_us, "launch": links.launch_us, "order": order, "flow": "turn" if in_turn else "all", "unit": "single" if single else "bank"}
        events = figures.step_events(layout, links, options["small_bytes"], order, in_turn, single)
        us = part * finish_us(events)
        given.append([data, state, rank, us])
        wanted.append((events, us - waited(events, us), 0 if single else padded(layout, events, rank, us)))
    found = module(chromium, "schedule").evaluate("""given => given.map(([data, state, rank, us]) => {
        const events = figure.timeline(data, state);
        return [events, figure.workedUs(events, us), figure.paddedUs(data, state, events, rank, us)]; })""", given)
    for (events, *sums), (marks, *theirs) in zip(wanted, found, strict=True):
        assert same(events, marks) and theirs == [pytest.approx(us, rel=1e-9, abs=1e-9) for us in sums]


def schedule() -> figures.MovingFigure:
    return figures.schedule_figure(bank_per_shape(LayoutSettings(), 8), MachineModel(20, 300, 350, 4), 2_000_000)


def measured() -> MachineModel:
    "A machine as it is measured: no round numbers, and times of its updates."
    return MachineModel(10.886903547476347, 258.145418662405, 390.36, 8.284769999704622, update={"512x512": [20.0, 17.0]})


def test_a_measured_machine_gives_one_timeline_in_words_and_in_the_figure(chromium, tmp_path):
    layout, links = bank_per_shape(LayoutSettings(), 4), measured()
    figure = figures.schedule_figure(layout, links, 0)
    tab, wrong = opened(chromium, tmp_path, figure)
    drawn = float(tab.get_attribute(".golf-figure > svg", "data-end"))
    assert f"ends after {drawn:.0f} microseconds" in figure.words and not wrong
    assert drawn == pytest.approx(finish_us(figures.step_events(layout, MachineModel(links.latency_us, links.bandwidth_gbytes_per_s, links.ns_tflops, links.launch_us), 0)), rel=1e-9)
    assert tab.locator(".golf-slider b").all_inner_texts() == ["4", "258 GB/s", "10.9 µs", "8.28 µs"]


def check_schedule(tab, world=8, gbytes=300, latency=20, launch=4, part=0.4, **arranged) -> None:
    "The marks on the screen are Python's timeline: blocks of every rank that is drawn, waits, padding and the four bars."
    layout, links = bank_per_shape(LayoutSettings(), world), MachineModel(latency, gbytes, 350, launch)
    events = figures.step_events(layout, links, 2_000_000, **arranged)
    us = part * finish_us(events)
    read = tab.evaluate("""() => { const chart = document.querySelector('.golf-figure > svg'), box = e => ['x', 'width'].map(n => +e.getAttribute(n)), num = (e, n) => e ? +e.dataset[n] : 0;
      return {left: +chart.dataset.left, plot: +chart.dataset.plot, now: +chart.querySelector('.now').dataset.now,
        ranks: [...chart.querySelectorAll('g[data-rank]')].map(g => ({rank: +g.dataset.rank, waited: num(g.querySelector('[data-waited]'), 'waited'), padded: num(g.querySelector('[data-padded]'), 'padded'),
          blocks: [...g.querySelectorAll('[data-what]')].map(e => [`${e.dataset.what} ${e.dataset.of}`, +e.dataset.start, +e.dataset.end, ...box(e)])})),
        bars: [...document.querySelectorAll('[data-us]')].map(e => [e.dataset.unit, e.dataset.flow, +e.dataset.us, box(e)[1]])}; }""")
    assert read["now"] == pytest.approx(us, rel=1e-9)
    assert [row["rank"] for row in read["ranks"]] == (list(range(world)) if world <= 8 else [0, 1, 2, 3, 4, world - 3, world - 2, world - 1])
    drawn = [e for e in events if e.end_us > e.start_us]
    scale = read["plot"] / finish_us(events)
    for row in read["ranks"]:
        assert row["waited"] == pytest.approx(waited(events, us), rel=1e-9, abs=1e-6)
        assert row["padded"] == pytest.approx(0 if arranged.get("single") else padded(layout, events, row["rank"], us), rel=1e-9, abs=1e-9)
        assert [b[0] for b in row["blocks"]] == [e.name for e in drawn]
        for (_, start, end, x, width), event in zip(row["blocks"], drawn):
            assert (start, end) == (pytest.approx(event.start_us, rel=1e-9), pytest.approx(event.end_us, rel=1e-9))
            assert x == pytest.approx(read["left"] + scale * event.start_us, abs=1e-6)
            if event.stream == "net":
                full = scale * (event.end_us - event.start_us)
                assert width == pytest.approx(full - min(1, full / 4), abs=1e-6)
    longest = max(bar[2] for bar in read["bars"])
    assert len(read["bars"]) == 4
    for unit, flow, took, width in read["bars"]:
        assert took == pytest.approx(finish_us(figures.step_events(layout, links, 2_000_000, arranged.get("order", "big_first"), flow == "turn", unit == "single")), rel=1e-9)
        assert width / max(bar[3] for bar in read["bars"]) == pytest.approx(took / longest, rel=1e-9)


@pytest.mark.parametrize("width, scheme", SCREENS)
def test_each_control_of_the_schedule_moves_its_marks(chromium, tmp_path, width, scheme):
    tab, wrong = opened(chromium, tmp_path, schedule(), width, scheme)
    assert not tab.query_selector(".golf-figure img") and letters(tab) >= 11
    check_schedule(tab)
    press(tab, "ranks", "ArrowRight", 4)
    check_schedule(tab, world=12)
    press(tab, "ranks", "Home")
    check_schedule(tab, world=1)
    press(tab, "ranks", "ArrowRight", 5)
    press(tab, "gbytes", "ArrowLeft", 3)
    check_schedule(tab, world=6, gbytes=100)
    press(tab, "latency", "ArrowRight")
    check_schedule(tab, world=6, gbytes=100, latency=30)
    press(tab, "launch", "End")
    check_schedule(tab, world=6, gbytes=100, latency=30, launch=20)
    tab.keyboard.press("ArrowLeft")
    changed = dict(world=6, gbytes=100, latency=30, launch=15)
    for name, start, arranged in (("order", "big_first", {"order": "small_first"}), ("flow", "all", {"order": "small_first", "in_turn": True}), ("unit", "bank", {"order": "small_first", "in_turn": True, "single": True})):
        tab.focus(f"[data-name={name}] input[value={start}]")
        tab.keyboard.press("ArrowRight")
        assert tab.evaluate("getComputedStyle(document.activeElement.parentElement).outlineStyle") == "solid"
        check_schedule(tab, **changed, **arranged)
    tab.get_by_text("banks", exact=True).click()
    tab.get_by_text("all under way", exact=True).click()
    tab.get_by_text("big first").click()
    press(tab, "time", "End")
    check_schedule(tab, **changed, part=1)
    assert "every rank has all new weights" in tab.inner_text(".golf-say")
    press(tab, "time", "ArrowLeft", 250)
    check_schedule(tab, **changed, part=0.75)
    assert tab.get_attribute("input[name=time]", "aria-valuetext") == tab.inner_text(".golf-say")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width and letters(tab) >= 11
    assert not tab.evaluate("[...document.querySelectorAll('input')].filter(e => !e.labels.length && !e.ariaLabel).length") and not wrong


def test_a_finger_scrubs_through_the_step(chromium, tmp_path):
    tab, wrong = opened(chromium, tmp_path, schedule(), 390, "light", has_touch=True, is_mobile=True)
    box = tab.locator(".golf-figure > svg").first.bounding_box()
    left, plot = (float(tab.get_attribute(".golf-figure > svg", f"data-{name}")) for name in ("left", "plot"))
    tab.touchscreen.tap(box["x"] + left + plot / 2, box["y"] + 60)
    check_schedule(tab, part=0.5)
    tab.get_by_text("single matrices", exact=True).tap()
    check_schedule(tab, part=0.5, single=True)
    assert not wrong


def test_the_sentence_says_what_happens_and_how_long_gpus_have_waited(chromium, tmp_path):
    tab, _ = opened(chromium, tmp_path, schedule())
    events = predict(comm_schedule(bank_per_shape(LayoutSettings(), 8)), bank_per_shape(LayoutSettings(), 8), MachineModel(20, 300, 350, 4), 2_000_000)
    press(tab, "time", "Home")
    assert tab.inner_text(".golf-say").replace("\u00a0", " ") == "At 0 µs the network all-reduces the small gradients; every GPU waits. So far each GPU has waited 0 µs."
    press(tab, "time", "ArrowRight", 500)
    us = finish_us(events) / 2
    at = {e.stream: e.name for e in events if e.start_us <= us < e.end_us}
    assert at == {"net": "scatter kv_bank", "gpu": "work mlp_down_bank"}
    assert tab.inner_text(".golf-say").replace("\u00a0", " ") == f"At {us:.0f} µs the network reduce-scatters the gradients of kv; Newton-Schulz runs on mlp_down (2 slots on each rank). So far each GPU has waited {waited(events, us):.0f} µs."


# bits

def on_grid(row: list[float], clip: float, levels: int) -> dict:
    "What the library makes of a row."
    w, qmax = torch.tensor([row], dtype=torch.float64), (levels - 1) // 2
    scale = row_scale(row_clip(w, 1.0) * clip, qmax)
    q = quantize_rows(w, scale, qmax)
    back = dequantize_rows(q, scale)
    assert torch.equal(back, round_to_grid(w, torch.tensor([clip], dtype=torch.float64), qmax))
    return {"scale": scale.item(), "integers": q[0].tolist(), "bits": entropy_bits(q.numpy()), "error": (back - w).square().mean().item()}


def by_gptq(w: list[float], rho: float) -> tuple[list[int], list[int], list[float]]:
    "Plain rounding and GPTQ of two weights, and both squared errors of the output."
    h, pair, one = torch.tensor([[1, rho], [rho, 1]], dtype=torch.float64), torch.tensor([w], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    order, _, upper = hessian_factor(h, 0.0)
    assert order.tolist() == [0, 1]
    ways = [quantize_rows(pair, one, 31), gptq_columns(pair.clone(), one, upper)]
    return ways[0][0].tolist(), ways[1][0].tolist(), [((q - pair) @ h @ (q - pair).T).item() for q in ways]


def close(ours: float, theirs: float) -> bool:
    return abs(ours - theirs) <= 1e-9 * max(1.0, abs(ours))


def test_the_port_of_the_grid_gives_its_numbers_in_300_random_rows(chromium):
    r = random.Random(0)
    given = [[[r.gauss(0, 10 ** r.uniform(-7, 4)) for _ in range(r.randint(1, 300))], r.uniform(0.02, 1), 2 * r.randint(1, 63) + 1] for _ in range(298)]
    given += [[[0.0] * 9, 0.5, 63], [[0.5, 1.5, -2.5, 31.0], 1.0, 63]]  # nothing but zeros; ties go to even integers
    found = module(chromium, "bits").evaluate("given => given.map(([row, clip, levels]) => figure.onGrid(row, clip, (levels - 1) / 2))", given)
    for case, theirs in zip(given, found, strict=True):
        ours = on_grid(*case)
        assert ours["integers"] == theirs["integers"] and ours["scale"] == theirs["scale"]
        assert close(ours["bits"], theirs["bits"]) and abs(ours["error"] - theirs["error"]) <= 1e-9 * max(ours["error"], 1e-300)
    assert found[-1]["integers"] == [0, 2, -2, 31]


def test_the_port_of_gptq_gives_its_numbers_in_300_random_pairs(chromium):
    r = random.Random(1)
    given = [[[r.uniform(-3, 3), r.uniform(-3, 3)], r.uniform(-0.98, 0.98)] for _ in range(300)]
    found = module(chromium, "bits").evaluate("""given => given.map(([w, rho]) => { const {integers} = figure.gptq(w, rho), plain = w.map(v => figure.nearest(v, 1, 31));
        return [plain, integers, [plain, integers].map(p => figure.outputError(w, p, rho)), figure.factor(rho)]; })""", given)
    differ = 0
    for (w, rho), (plain, gptq, errors, upper) in zip(given, found, strict=True):
        ours = by_gptq(w, rho)
        assert ours[:2] == (plain, gptq) and all(map(close, ours[2], errors))
        factor = hessian_factor(torch.tensor([[1, rho], [rho, 1]], dtype=torch.float64), 0.0)[2]
        assert all(map(close, factor[torch.triu_indices(2, 2).unbind()].tolist(), upper))
        differ += plain != gptq
    assert differ > 20, "else nothing is told apart"


def bits_row() -> list[float]:
    return json.loads((ROOT / "nbs" / "results" / "row_first_program_cpu.json").read_text())["samples"]["row 0"]


def check_row(tab, clip: float, levels: int) -> None:
    "Bars, ticks beyond the clip, grid lines and the dots on both curves are the library's numbers."
    row = bits_row()
    ours = on_grid(row, clip, levels)
    read = tab.evaluate("""() => { const part = document.querySelector('[data-part=row]'), all = (q, f) => [...part.querySelectorAll(q)].map(f), chart = part.querySelector('svg[aria-label^=Weights]');
      return {numbers: ['scale', 'bits', 'error'].map(n => +chart.dataset[n]), counts: all('[data-q]', e => [+e.dataset.q, +e.dataset.n, +e.getAttribute('height')]), cut: all('[data-cut]', e => +e.dataset.cut),
        ticks: all('[data-w]', e => +e.getAttribute('x1')), beyond: all('[data-beyond]', e => +e.dataset.w), grid: all('[data-grid]', e => [+e.dataset.grid, +e.getAttribute('x1')]),
        curve: Object.fromEntries(all('[data-curve]', e => [e.dataset.curve, +e.dataset.value])), best: +part.querySelector('[data-best]').dataset.best}; }""")
    assert all(map(close, [ours["scale"], ours["bits"], ours["error"]], read["numbers"]))
    points, counts = np.unique(ours["integers"], return_counts=True)
    assert sorted(read["counts"])[0][0] == points[0] and [c[:2] for c in sorted(read["counts"])] == [[q, n] for q, n in zip(points.tolist(), counts.tolist())]
    tallest = max(c[2] for c in read["counts"])
    assert all(c[2] == pytest.approx(tallest * c[1] / counts.max(), abs=1e-6) for c in read["counts"]), "heights are counts"
    qmax = (levels - 1) // 2
    assert read["beyond"] == [w for w in row if abs(w) > (qmax + 0.5) * ours["scale"]] and sum(read["cut"]) == len(read["beyond"])
    top = max(map(abs, row))
    assert [g[0] for g in read["grid"]] == pytest.approx([q * ours["scale"] for q in range(-qmax, qmax + 1) if abs(q * ours["scale"]) <= 1.04 * top], rel=1e-9)
    scale = (max(read["ticks"]) - min(read["ticks"])) / (max(row) - min(row))
    assert [x for _, x in read["grid"]] == pytest.approx([min(read["ticks"]) + scale * (g - min(row)) for g, _ in read["grid"]], abs=1e-6), "one axis for weights and grid"
    spread = float(np.sqrt(np.mean(np.square(row))))
    assert close(100 * ours["error"] ** 0.5 / spread, read["curve"]["error"]) and close(ours["bits"], read["curve"]["bits"])
    errors = {c: on_grid(row, c / 100, levels)["error"] for c in range(5, 101)}
    assert errors[round(100 * read["best"])] == min(errors.values())


def check_pair(tab, w: list[float], rho: float) -> None:
    "The points, the moved weight and the ellipses of equal error, which go through the points."
    plain, gptq, errors = by_gptq(w, rho)
    read = tab.evaluate("""() => { const part = document.querySelector('[data-part=pair]'), one = q => part.querySelector(q), num = (e, ...names) => names.map(n => +e.getAttribute(n));
      const square = one('[data-plain]'), dot = one('[data-gptq]'), ways = ['plain', 'gptq'].map(n => one(`[data-ellipse=${n}]`));
      return {w: one('[role=slider]').dataset.w, at: one('[role=slider]').getAttribute('transform'), plain: square.dataset.plain, gptq: dot.dataset.gptq, square: num(square, 'x', 'y').map(v => v + 7), dot: num(dot, 'cx', 'cy'),
        errors: ways.map(e => +e.dataset.error), radii: ways.map(e => num(e, 'rx', 'ry')), moved: +one('[data-moved]').dataset.moved}; }""")
    assert [float(v) for v in read["w"].split()] == pytest.approx(w, abs=1e-12)
    assert (read["plain"], read["gptq"]) == (" ".join(map(str, plain)), " ".join(map(str, gptq))) and all(map(close, errors, read["errors"]))
    assert read["moved"] == pytest.approx(w[1] + rho * (w[0] - gptq[0]), rel=1e-9, abs=1e-9)
    at = [float(v) for v in re.findall(r"[-\d.]+", read["at"])]
    for point, (x, y), error, (rx, ry) in zip((plain, gptq), (read["square"], read["dot"]), errors, read["radii"]):
        along, across = (point[0] - w[0] + point[1] - w[1]) / 2 ** 0.5, (point[0] - w[0] - point[1] + w[1]) / 2 ** 0.5
        if abs(point[0] - w[0]) > 0.01:
            unit = (x - at[0]) / (point[0] - w[0])
            assert y == pytest.approx(at[1] - unit * (point[1] - w[1]), abs=1e-6)
            assert (along * unit / rx) ** 2 + (across * unit / ry) ** 2 == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize("width, scheme", SCREENS)
def test_each_control_of_bits_moves_its_marks(chromium, tmp_path, width, scheme):
    tab, wrong = opened(chromium, tmp_path, figures.bits_figure(bits_row()), width, scheme)
    assert not tab.query_selector(".golf-figure img") and letters(tab) >= 11
    check_row(tab, 0.6, 63)
    press(tab, "clip", "ArrowLeft", 20)
    check_row(tab, 0.4, 63)
    press(tab, "levels", "ArrowLeft", 24)
    check_row(tab, 0.4, 15)
    for key, clip in (("Home", 0.05), ("End", 1.0)):
        press(tab, "clip", key)
        check_row(tab, clip, 15)
    for key, levels in (("Home", 3), ("End", 127)):
        press(tab, "levels", key)
        check_row(tab, 1.0, levels)
    check_pair(tab, [0.6, 0.7], 0.9)
    press(tab, "rho", "ArrowLeft", 30)
    check_pair(tab, [0.6, 0.7], -0.6)
    tab.focus("[role=slider]")
    for key in ("ArrowRight", "ArrowRight", "ArrowUp", "ArrowLeft", *["ArrowDown"] * 5):
        tab.keyboard.press(key)
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    check_pair(tab, [0.65, 0.5], -0.6)
    assert tab.get_attribute("[role=slider]", "aria-valuetext") == "0.65 and 0.50"
    box = tab.locator("[role=slider] circle:last-child").bounding_box()
    tab.mouse.move(box["x"] + 8, box["y"] + 8)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 8 - 60, box["y"] + 8 + 40, steps=4)
    tab.mouse.up()
    w = [float(v) for v in tab.get_attribute("[role=slider]", "data-w").split()]
    assert w[0] < 0.1 and w[1] < 0.2
    check_pair(tab, w, -0.6)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width and letters(tab) >= 11
    assert not tab.evaluate("[...document.querySelectorAll('input')].filter(e => !e.labels.length && !e.ariaLabel).length") and not wrong


def test_the_words_under_bits_say_the_numbers(chromium, tmp_path):
    tab, _ = opened(chromium, tmp_path, figures.bits_figure(bits_row()))
    ours = on_grid(bits_row(), 0.6, 63)
    row, pair = (words.replace("\u00a0", " ") for words in tab.locator(".golf-say").all_inner_texts())
    assert f"A coder needs {ours['bits']:.2f} bits a weight" in row
    plain, gptq, errors = by_gptq([0.6, 0.7], 0.9)
    assert (plain, gptq) == ([1, 1], [1, 0]) and pair.endswith(f"The output's squared error is {errors[0]:.3f} with plain rounding and {errors[1]:.3f} with GPTQ.")


# where it stands

def test_without_scripts_there_is_a_picture_and_its_words(chromium, tmp_path):
    tab, _ = opened(chromium, tmp_path, schedule(), 390, java_script_enabled=False)
    picture = tab.locator(".golf-figure img")
    assert picture.bounding_box()["width"] > 300 and "Timeline of one optimizer step" in picture.get_attribute("alt")
    assert tab.inner_text(".golf-figure").strip() == "", "nothing of the module is shown"


def test_colours_follow_the_site_and_jupyterlab_and_else_the_system(chromium, tmp_path):
    tab, _ = opened(chromium, tmp_path, schedule(), scheme="light")
    ink = "getComputedStyle(document.querySelector('.golf-figure')).color"
    light = tab.evaluate(ink)
    dark = tab.evaluate(f"document.documentElement.dataset.theme = 'dark', {ink}")
    assert light != dark and tab.evaluate(f"document.documentElement.dataset.theme = 'light', {ink}") == light
    assert tab.evaluate(f"delete document.documentElement.dataset.theme, document.body.dataset.jpThemeLight = 'false', {ink}") == dark
    other, _ = opened(chromium, tmp_path, schedule(), scheme="dark")
    assert other.evaluate(ink) == dark
