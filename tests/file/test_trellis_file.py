"""Trellis matrices in a file: round trips, readers, refusals, bounds."""
import json
import math
import re
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from golfnb.file.artifact import Best, Plain, Quick, Rans, Zlib, check_codec, container_header, digit_bits, export_safetensors, has_repetitions, load_artifact, load_model, open_own, pack_bytes, save_artifact, unpack_bytes
from golfnb.model.golf import init_model, model_from_settings, named_state
from golfnb.file.quantize import Packed, dequantize_state, entropy_bits, quantize_state
from golfnb.settings import GolfError
from golfnb.tools.cli import main_cli
from golfnb.tools.play import Player
from golfnb.tools.programs import recipe_program
from golfnb.tools.report import quantized_counts
from golfnb.file.trellis import trellis_encode, trellis_levels
from golfnb.file.trellis_file import (COLUMNS, HIGH, LARGEST_INDEX, coarse_steps, column_factors, dequantize_trellis, pack_trellis, trellis_names, trellis_weights, without_parts)
from test_artifact import same
from tiny import TINY, model_settings, run_quietly, settings_for, tiny_data


def matrix(rows=12, cols=10, seed=0, large=300):
    "Indices with a few large ones, row steps, exponents."
    g = torch.Generator().manual_seed(seed)
    k = torch.randint(-20, 21, (rows, cols), generator=g, dtype=torch.int32)
    k[0, 0], k[rows - 1, cols - 1] = large, -large
    return k, coarse_steps(torch.rand(rows, generator=g) + 0.01), torch.randint(-31, 32, (cols,), generator=g, dtype=torch.int8)


def by_hand(k, rows, exponents):
    "The weights, one at a time, from the words of the chapter."
    out = torch.empty(k.shape)
    for c in range(k.shape[1]):
        state = 0
        for r in range(k.shape[0]):
            index = int(k[r, c])
            level = 2 * index + (state & 1)
            state = (state >> 1) ^ (state & 1) * (0o13 >> 1) ^ (index & 1) * (0o04 >> 1)
            octave, quarter = divmod(int(exponents[c]), 4)
            factor = np.ldexp(np.float32(2 ** (quarter / 4)), octave)
            out[r, c] = float(np.float32(np.float32(level) * np.float32(rows[r].item())) * factor)
    return out.bfloat16().float()


def test_the_weights_are_those_of_the_definition():
    whole = pack_trellis("w", *matrix())
    assert [*whole] == ["w", "w.columns", "w.high"] and [p.kind for p in whole.values()] == ["int8", "int6", "int8"]
    assert torch.equal(dequantize_trellis(whole)["w"], by_hand(*matrix()))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_digits_of_every_index_and_dtype(dtype):
    top = min(LARGEST_INDEX, torch.iinfo(dtype).max)
    k = torch.arange(-top, top + 1).to(dtype)[:, None]
    k = k[:len(k) // 100 * 100].reshape(-1, 5 if dtype == torch.int8 else 100)
    parts = pack_trellis("w", k, torch.ones(len(k)).half(), torch.zeros(k.shape[1], dtype=torch.int8))
    back = parts["w"].data.astype(int) + 255 * (parts["w.high"].data.astype(int) if "w.high" in parts else 0)
    assert np.array_equal(back, k.long().numpy()) and abs(parts["w"].data.astype(int)).max() <= 127
    assert ("w.high" in parts) == bool((k.long().abs() > 127).any())


def test_a_view_of_the_encoder_is_stored_as_it_is():
    "Encoders give columns as sequences; their transpose is not in order."
    g = torch.Generator().manual_seed(1)
    y = torch.randn(40, 30, generator=g) * 20
    k = trellis_encode(y).T
    back = dequantize_trellis(pack_trellis("w", k, torch.ones(30).half(), torch.zeros(40, dtype=torch.int8)))["w"]
    assert torch.equal(back, trellis_levels(k.T.contiguous()).T.bfloat16().float()) and (back - y.T).abs().max() < 2.5


def test_factors_are_exact_for_whole_octaves_and_nearest_else():
    e = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8)
    found = column_factors(e)
    assert found.dtype == torch.float32 and all(v.item() == np.ldexp(np.float32(2 ** (i % 4 / 4)), i // 4) for i, v in zip(e.tolist(), found, strict=True))


def test_coarse_steps_are_nearest_with_a_low_byte_of_zero():
    steps = torch.logspace(-4, 4, 1000).half()
    found = coarse_steps(steps)
    assert not (found.view(torch.int16) & 255).any() and torch.equal(coarse_steps(found), found)
    assert ((found.float() / steps.float()).log2().abs() <= math.log2(1.125) + 1e-3).all() and len(found.unique()) < 120


def test_neighbours_do_not_matter_and_matrices_of_equal_height_go_together():
    some = {f"m{i}": matrix(rows, cols, i, large) for i, (rows, cols, large) in enumerate([(12, 10, 5), (12, 3, 400), (7, 10, 5), (12, 10, 129), (1, 1, 0)])}
    packed = {n: p for name, m in some.items() for n, p in pack_trellis(name, *m).items()} | quantize_state({"a": torch.randn(90, 80), "gain": torch.ones(5)}, False)
    back = dequantize_trellis(packed)
    assert back.keys() == some.keys() | {"a", "gain"}
    for name, m in some.items():
        assert torch.equal(back[name], dequantize_trellis(pack_trellis(name, *m))[name]) and torch.equal(back[name], by_hand(*m)), name
    plain = dequantize_state({n: packed[n] for n in ("a", "gain")})
    assert torch.equal(back["a"], plain["a"]) and torch.equal(back["gain"], plain["gain"])


def test_the_plain_reader_refuses_a_trellis_and_names_its_reader():
    packed = pack_trellis("a", *matrix(12, 10, 0, 400)) | quantize_state({"gain.columns": torch.ones(5)}, False)
    with pytest.raises(GolfError, match="^a must .*a.columns.*dequantize_trellis"):
        dequantize_state(packed)
    assert torch.equal(dequantize_state({"gain.columns": packed["gain.columns"]})["gain.columns"], torch.ones(5))


def test_a_state_without_a_trellis_is_read_as_before():
    packed = quantize_state({"a.high": torch.randn(300, 300), "b": torch.ones(5)}, False)
    assert all(torch.equal(w, dequantize_state(packed)[n]) for n, w in dequantize_trellis(packed).items()) and trellis_names({}) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_bits():
    k, rows, exponents = matrix(300, 200)
    there = trellis_weights(trellis_levels(k.T.cuda()).T, rows.cuda(), exponents.cuda())
    assert torch.equal(there.cpu(), trellis_weights(trellis_levels(k.T).T, rows, exponents))
    assert all(same(a, b) for a, b in [(pack_trellis("w", k.cuda(), rows.cuda(), exponents.cuda()), pack_trellis("w", k, rows, exponents))])


def zeros(kind, *shape):
    return Packed(kind, shape, np.zeros(shape, np.int8), np.ones(shape[0], np.float16))


@pytest.mark.parametrize("change, words", [
    ({"w": None}, "w.columns .*int8 matrix w, found none"),
    ({"w": zeros("int6", 12, 10)}, "w.columns .*int8 matrix w, found int6"),
    ({"w": Packed("fp16", (), np.zeros((), np.float16))}, r"int8 matrix w, found fp16 \[\]"),
    ({"w.columns": zeros("int6", 1, 9)}, r"w.columns must be int6 \[1, 10\], found int6 \[1, 9\]"),
    ({"w.columns": zeros("int6", 10, 1)}, r"w.columns must be int6 \[1, 10\]"),
    ({"w.columns": zeros("int8", 1, 10)}, r"w.columns must be int6"),
    ({"w.high": zeros("int8", 12, 9)}, r"w.high must be int8 \[12, 10\], found int8 \[12, 9\]"),
    ({"w.high": zeros("int6", 12, 10)}, "w.high must be int8"),
    ({"w.columns.columns": zeros("int6", 1, 10)}, "w.columns.columns .*int8 matrix w.columns, found int6"),
    ({"t": zeros("int8", 75_000, 1), "t.columns": zeros("int6", 1, 1)}, "75,000 rows.*75,012"),
])
def test_parts_that_do_not_fit_are_refused(change, words):
    packed = {n: p for n, p in (pack_trellis("w", *matrix()) | change).items() if p}
    with pytest.raises(GolfError, match=words) as caught:
        dequantize_trellis(packed)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change, words", [
    ({"k": torch.zeros(12, 10)}, "float32"), ({"k": torch.zeros(12, dtype=torch.int32)}, r"int32 \[12\]"), ({"k": torch.zeros(0, 10, dtype=torch.int32)}, r"\[0, 10\]"),
    ({"k": torch.zeros(12, 10, dtype=torch.bool)}, "bool"),
    ({"k": torch.full((12, 10), LARGEST_INDEX + 1)}, "32,512, found 32,513"), ({"k": torch.full((12, 10), -2**40)}, "1,099,511,627,776"),
    ({"k": torch.full((12, 10), -2**31, dtype=torch.int32)}, "2,147,483,648"),
    ({"k": torch.zeros(75_001, 1, dtype=torch.int8), "rows": torch.ones(75_001).half(), "columns": torch.zeros(1, dtype=torch.int8)}, "75,000 rows.*75,001"),
    ({"rows": torch.ones(11).half()}, r"float16 \[11\]"), ({"rows": torch.ones(12)}, "float32"), ({"rows": torch.full((12,), math.inf).half()}, "diverged"), ({"rows": torch.full((12,), math.nan).half()}, "diverged"),
    ({"columns": torch.zeros(9, dtype=torch.int8)}, r"int8 \[9\]"), ({"columns": torch.full((10,), 32, dtype=torch.int8)}, "31, found 32"), ({"columns": torch.full((10,), -128, dtype=torch.int8)}, "31, found 128"),
    ({"columns": torch.zeros(10)}, "float32"),
])
def test_what_cannot_be_stored_is_refused(change, words):
    given = dict(zip(("k", "rows", "columns"), matrix(), strict=True)) | change
    with pytest.raises(GolfError, match=f"w .*{words}"):
        pack_trellis("w", **given)


# --- in a file

@pytest.fixture(scope="module")
def tiny():
    "A model's file with every matrix of its blocks on a trellis, and what a reader must find."
    s = settings_for(NUM_LAYERS=2, MODEL_DIM=32, NUM_HEADS=2, NUM_KV_HEADS=1, VOCAB_SIZE=64, ROPE_DIMS=8, BIGRAM_VOCAB_SIZE=32, BIGRAM_DIM=8,
                     VE_LAYERS=1, VE_DIM=8, XSA_LAST_N=1, TRAIN_SEQ_LEN=16, EVAL_SEQ_LEN=16, EVAL_STRIDE=8)
    model, cfg, _ = model_from_settings(model_settings(s))
    init_model(model, cfg, 0)
    named = named_state(model)
    packed = quantize_state(named, False)
    wanted = dequantize_state(packed)
    for i, (name, w) in enumerate(named.items()):
        if name.startswith("blocks.") and w.ndim == 2 and min(w.shape) > 1:
            some = matrix(*w.shape, seed=i, large=[100, 300][i % 2])
            packed |= pack_trellis(name, *some)
            wanted[name] = trellis_weights(trellis_levels(some[0].T).T, *some[1:])
    return packed, wanted, {"settings": asdict(cfg), "tokenizer_sha256": "0" * 64, "vocab_size": 64, "recipe": "pr549", "seed": 0, "steps": 0, "trellis": 8, "shares": {}}


def test_readers_take_such_a_file(tiny, tmp_path):
    packed, wanted, meta = tiny
    assert sum(COLUMNS in n for n in packed) > 6 and 0 < sum(HIGH in n for n in packed) < sum(COLUMNS in n for n in packed)
    save_artifact(tmp_path / "a.golf", packed, meta, Rans())
    assert same(load_artifact(tmp_path / "a.golf")[1], packed) and same(unpack_bytes((tmp_path / "a.golf").read_bytes(), Rans())[1], packed)
    loaded, found, _ = load_model(tmp_path / "a.golf")
    assert found == meta and all(torch.equal(w.reshape(-1), wanted[n].reshape(-1)) for n, w in named_state(loaded).items())
    safetensors = pytest.importorskip("safetensors.torch")
    export_safetensors(tmp_path / "a.golf", tmp_path / "a.safetensors")
    out = safetensors.load_file(tmp_path / "a.safetensors")
    assert out.keys() == wanted.keys() and all(torch.equal(out[n], w) for n, w in wanted.items())


def test_a_part_too_few_or_too_many_is_refused_before_anything_is_decoded(tiny, tmp_path, monkeypatch):
    packed, _, meta = tiny
    name = next(n for n in packed if n + HIGH in packed)
    shape = packed[name].shape
    monkeypatch.setattr(Rans, "decompress", lambda *_: pytest.fail("decoded"))
    for change in ({name: None}, {name + COLUMNS: None}, {name + HIGH: zeros("int8", shape[0], shape[1] + 1)}, {name + COLUMNS: zeros("int6", 1, 1)}, {"more" + COLUMNS: zeros("int6", 1, 1)}):
        save_artifact(tmp_path / "a.golf", {n: p for n, p in (packed | change).items() if p}, meta, Rans())
        with pytest.raises(GolfError, match="a.golf"):
            load_model(tmp_path / "a.golf")


def test_a_model_knows_matrices_without_their_parts(tiny):
    forms = {n: (p.kind, tuple(p.shape)) for n, p in tiny[0].items()}
    assert without_parts(forms).keys() == tiny[1].keys()


# --- bytes and time

def section_bytes(packed):
    return {section: n for section, _, n in open_own(pack_bytes(packed, {}, Rans()))[0]["sections"]}


def test_steps_cost_little():
    "45,000 rows and columns whose steps deviate by an octave: less than 0.3 % of 16 MB."
    g, state = torch.Generator().manual_seed(0), {}
    for i in range(662):
        rows, exponents = coarse_steps(0.003 * 2 ** torch.randn(68, generator=g)), torch.randn(68, generator=g).mul(4).round().to(torch.int8)
        state |= pack_trellis(f"m{i}", torch.zeros(68, 68, dtype=torch.int8), rows, exponents)
    sizes = section_bytes(state)
    assert 30_000 < sizes["scale"] + sizes["int6"] < 0.003 * 16e6


def test_high_digits_cost_little():
    "Of 27 million weights 18,000: less than 45 kB. Here a twentieth of both, and tables that do not shrink with them."
    g, state = torch.Generator().manual_seed(0), {}
    for i, (rows, cols) in enumerate([(512, 512), (512, 1536), (256, 1024)]):
        k = torch.randn(rows, cols, generator=g).mul(6).round().int()
        k = torch.where(torch.rand(k.shape, generator=g) < 18 / 27_000, k + 300 * k.sign(), k)
        state |= pack_trellis(f"m{i}", k, torch.ones(rows).half(), torch.zeros(cols, dtype=torch.int8))
    without = {n: p for n, p in state.items() if not n.endswith(HIGH)}
    assert sum(np.count_nonzero(p.data) for n, p in state.items() if n.endswith(HIGH)) > 800
    assert section_bytes(state)["int8"] - section_bytes(without)["int8"] < 250 + 45_000 * sum(p.data.size for n, p in without.items() if n + COLUMNS in state) / 27e6


def test_a_full_model_decodes_in_seconds():
    "36 million weights in 15 s of processor time, on a machine that does other things."
    k = torch.randint(-9, 10, (2048, 512), dtype=torch.int32)
    k[5, 5] = 1000
    one = pack_trellis("w", k, torch.ones(2048).half(), torch.zeros(512, dtype=torch.int8))
    state = {f"{i}{n}": p for i in range(34) for n, p in one.items()}
    start = time.process_time()
    assert len(dequantize_trellis(state)) == 34
    assert time.process_time() - start < 15


# --- the tools on a run

SIZES = {"MODEL_DIM": "64", "SMALL_TENSOR": "4096", "ITERATIONS": "2", "GPTQ_CALIB_SAMPLES": "2", "LOOP_START": "0", "LOOP_END": "0", "PARALLEL_START_LAYER": "1", "RECIPE": "pr2135"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "A tiny run of a recipe with a trellis, to a size that is no end of the scale."
    root = tmp_path_factory.mktemp("trellis")
    (root / "data").mkdir()
    data = tiny_data(root / "data")
    run_quietly(recipe_program("pr2135"), {**TINY, **SIZES, **data, "TARGET_BYTES": "190000", "RUN_ID": "it", "RUNS_DIR": str(root)}, b"#" * 1000)
    return root / "it"


def said(capsys, *words) -> str:
    "What a command prints; it must succeed."
    capsys.readouterr()
    status = main_cli([*map(str, words)])
    out, err = capsys.readouterr()
    assert status == 0, err
    return out


def test_quantize_makes_such_a_file_again_and_to_a_target(run, tmp_path, capsys):
    said(capsys, "quantize", run, "-o", tmp_path / "same.golf")
    assert (tmp_path / "same.golf").read_bytes() == (run / "artifact.golf").read_bytes()
    target = (run / "artifact.golf").stat().st_size - 8000
    said(capsys, "quantize", run, "--target-bytes", target, "-o", tmp_path / "small.golf")
    size, packed = (tmp_path / "small.golf").stat().st_size, load_artifact(tmp_path / "small.golf")[1]
    assert 0.97 * target < size <= target and sum(name.endswith(COLUMNS) for name in packed) > 3


def test_tools_read_such_a_run(run, tmp_path, capsys):
    summary = json.loads((run / "summary.json").read_text())
    words = [f"{name}={TINY[name]}" for name in ("EVAL_SEQ_LEN", "EVAL_STRIDE", "VAL_BATCH_SIZE", "TTT_CHUNK_TOKENS", "TTT_EPOCHS", "TTT_BATCH_SEQS")]
    found = said(capsys, "score", run, "--ttt", *words)
    scores = [float(bpb) for bpb in re.findall(r"val_bpb:(\S+)", found)]
    assert scores == pytest.approx([summary["sliding_bpb"], summary["ttt_bpb"]], abs=1e-6)
    assert said(capsys, "sample", run, "Return the", "--tokens", 4).startswith("Return the")
    assert Path(said(capsys, "report", run).strip()).is_file() and "trellis: " in (run / "report.html").read_text()
    Player(run)
    pytest.importorskip("safetensors")
    said(capsys, "artifact", "export", run / "artifact.golf", tmp_path / "a.safetensors")


def test_inspect_shows_each_matrix_with_its_bits_and_its_share(run, capsys):
    meta, packed = load_artifact(run / "artifact.golf")
    out = said(capsys, "artifact", "inspect", run / "artifact.golf")
    assert "column exponents" in out and "  shares " not in out
    lines = dict(re.findall(r"^  (\S+weight) +\S+ x \S+, (.*)$", out, re.M))
    names = [name for name in packed if name + COLUMNS in packed]
    assert lines.keys() == {*names} and len(names) > 3
    for name in names:
        assert lines[name].endswith(f" bits, {meta['shares'][name]:.1%}")
    bits = digit_bits(run / "artifact.golf")
    stored = {section: n for section, _, n in container_header(run / "artifact.golf")["sections"]}
    assert 0.8 * stored["int8"] < sum(bits.values()) / 8 < stored["int8"]


@pytest.mark.parametrize("codec", [Rans(), Zlib(), Plain()], ids=lambda codec: codec.name)
def test_bits_of_digits_are_what_they_take(codec, tmp_path):
    "Of rANS by its own frequencies, which know rows from rows; else the entropy."
    g = torch.Generator().manual_seed(0)
    fine, coarse = (torch.randn(300, 200, generator=g).mul(scale).round().int() for scale in (20, 1))
    parts = [pack_trellis(name, k, torch.ones(300).half(), torch.zeros(200, dtype=torch.int8)) for name, k in (("coarse", coarse), ("fine", fine))]
    save_artifact(tmp_path / "a.golf", parts[0] | parts[1], {}, codec)
    bits = digit_bits(tmp_path / "a.golf")
    for name, k in (("coarse", coarse), ("fine", fine)):
        assert bits[name] == pytest.approx(entropy_bits(k.to(torch.int8).numpy()) * k.numel(), rel=0.03)


@pytest.mark.parametrize("shares", [None, [1], {"w": "a"}, {"w": -1}, {"w": 10**15}, {"w": True}, {"w": []}], ids=str)
def test_shares_that_make_no_sense_are_left_out(shares, tmp_path, capsys):
    save_artifact(tmp_path / "a.golf", pack_trellis("w", *matrix()), {"shares": shares}, Rans())
    out = said(capsys, "artifact", "inspect", tmp_path / "a.golf")
    assert re.search(r"^  w +12 x 10, \d+\.\d+ bits(, 100.0%)?$", out, re.M) and ("100.0%" in out) == (shares == {"w": True})


def test_a_codec_of_ones_own_is_inspected_without_bits(tmp_path, capsys):
    class Own(Plain):
        name = "own"

    save_artifact(tmp_path / "a.golf", pack_trellis("w", *matrix()), {}, Own())
    assert re.search(r"^  w +12 x 10$", said(capsys, "artifact", "inspect", tmp_path / "a.golf"), re.M)


def test_a_report_counts_indices_and_no_steps(tmp_path):
    packed = pack_trellis("w", *matrix()) | quantize_state({"blocks.0.mlp.fc.weight": torch.randn(300, 300)}, False)
    save_artifact(tmp_path / "a.golf", packed, {}, Rans())
    counts = quantized_counts(tmp_path / "a.golf")
    assert counts.keys() == {"int6", "trellis"} and counts["int6"].sum() == 90_000 and counts["trellis"].sum() == 120
    assert counts["trellis"][0] == counts["trellis"][-1] == 1, "what is beyond 127"


def test_quick_tries_lzma_on_small_sections_alone(monkeypatch):
    "Rows of very different steps look worth a try to `Best`."
    g = np.random.default_rng(0)
    rows = [g.normal(0, scale, 2**15).round().astype(np.int8) for scale in np.repeat([0.3, 30], 20)]
    large, small = np.concatenate(rows).tobytes(), bytes(range(256)) * 20
    assert has_repetitions(large)
    assert Quick().compress(small, [(20, 256)]) == Best().compress(small, [(20, 256)]) and Quick().compress(small, [(20, 256)])[0] in ("lzma", "zlib")
    monkeypatch.setattr("lzma.compress", lambda *_, **how: pytest.fail("lzma was tried"))
    assert Quick().compress(large, [(40, 2**15)]) == Rans().compress(large, [(40, 2**15)])
    monkeypatch.undo()
    check_codec(Quick())
    packed = pack_trellis("w", *matrix())
    assert same(unpack_bytes(pack_bytes(packed, {}, Quick()), Quick())[1], packed)
