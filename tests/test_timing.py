"""`golfnb bench kernels|attention|trace|scaling`: what they refuse, what they write on a CPU, and the sums made of it."""
import json

import pytest
import torch
from tiny import TINY, golfnb

from golfnb.bench import BENCH_JOBS, BENCH_NOTES, BenchJob, read_result
from golfnb.config import GolfError
from golfnb.kernels import KERNELS_ON, MLP_DOWN_TILES, MLP_UP_TILES
from golfnb.parallel_muon import Ranks
from golfnb.timing import MLP_TILES, apply_words, bench_trace, best_tiles, check_sets, device_events, event_kind, merge_events, run_timing, scaling_table, tail_of, time_cases

SMALL = {**TINY, "MODEL_DIM": "64", "NUM_LAYERS": "2", "TRAIN_SEQ_LEN": "32", "EVAL_SEQ_LEN": "32", "EVAL_STRIDE": "16", "TTT_CHUNK_TOKENS": "128", "VAL_BATCH_SIZE": "4096", "DATA_PATH": "absent"}


def test_attention_writes_a_whole_result(tmp_path):
    words = [f"{k}={v}" for k, v in SMALL.items() if k != "DATA_PATH"]
    done = golfnb("bench", "attention", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = read_result("attention_cpu_1", tmp_path / "nbs" / "results")
    assert found["note"] == BENCH_NOTES["attention"] and found["samples"].keys() == found["facts"]["floors_ms"].keys()
    assert all(len(v) == 8 and min(v) > 0 for v in found["samples"].values()) and found["facts"]["rates"]["copy"] > 1e6
    floors = found["facts"]["floors_ms"]
    assert floors["flash, forward+backward"] >= 2 * floors["flash, forward"] > 0


def test_a_trace_tells_every_stream_from_the_first_collective_on(tmp_path):
    samples, unit, facts = bench_trace(BenchJob("trace", scratch=str(tmp_path), warmup=1), Ranks(), SMALL)
    assert unit == "us" and len({len(v) for v in samples.values()}) == 1 and min(samples["start"]) == 0 and "products" in facts["kinds"]
    assert tail_of({"samples": samples, "facts": facts}) == []          # one rank sends nothing
    made = {"samples": {"start": [0, 10, 12, 30], "length": [11, 5, 20, 1], "stream": [0, 1, 0, 0], "kind": [1, 0, 1, 1]}, "facts": {"streams": [7, 20], "kinds": ["communication", "products"]}}
    assert [(r["start"], r["kind"]) for r in tail_of(made)] == [(-10, "products"), (0, "communication"), (2, "products"), (20, "products")]


def test_merging_keeps_the_whole_span_and_the_order():
    events = [{"name": n, "stream": s, "start": float(t), "length": 2.0} for t, (n, s) in enumerate([("triton_a", 1), ("nvjet", 1), ("triton_b", 2), ("nvjet", 1), ("nvjet", 1)] * 3)]
    merged = merge_events(events)
    for stream in (1, 2):
        mine = [e for e in merged if e["stream"] == stream]
        assert max(e["start"] + e["length"] for e in mine) == max(e["start"] + 2 for e in events if e["stream"] == stream)
        assert all(a["kind"] != b["kind"] or b["start"] - a["start"] - a["length"] >= 3 for a, b in zip(mine, mine[1:]))
    assert merge_events([]) == [] and event_kind("void at::native::vectorized_elementwise_kernel") == "other"


def test_device_events_see_what_ran():
    x = torch.randn(32, 32)
    names = [e["name"] for e in device_events(lambda: x @ x, torch.device("cpu"))]
    assert "aten::mm" in names


def test_a_case_that_cannot_be_built_is_named_and_the_tiles_come_back():
    before = dict(MLP_UP_TILES), dict(MLP_DOWN_TILES)

    def breaks():
        MLP_UP_TILES.clear()
        raise ValueError("out of resource: shared memory")

    cuda_like = {"good": (lambda: None, 1, 1)}
    samples, failed = time_cases(cuda_like, torch.device("cpu"), calls=2)
    assert list(samples) == ["good"] and not failed
    with pytest.raises(ValueError):
        time_cases({"bad": (breaks, 1, 1)}, torch.device("cpu"), calls=1)      # on a CPU nothing is built before it runs
    assert (MLP_UP_TILES, MLP_DOWN_TILES) == before and KERNELS_ON == {"heads", "mlp", "xsa", "fold", "ns"}


@pytest.mark.parametrize("own", [{"ns"}, set()], ids=["on", "off"])
def test_a_set_leaves_the_optimizer_alone(own):
    usual = set(KERNELS_ON)
    try:
        KERNELS_ON.symmetric_difference_update({"ns"} - own)
        apply_words({"heads", "graph"}, {})
        assert KERNELS_ON == {"heads"} | own
        apply_words(usual - {"ns"} | own, {})
        assert KERNELS_ON == usual - {"ns"} | own
    finally:
        KERNELS_ON.update(usual)


@pytest.mark.parametrize("at", range(len(MLP_TILES)))
def test_the_fastest_tiles_are_read_back_from_their_name(at):
    words = "{BM}x{BN}x{BK} warps {num_warps} stages {num_stages} waves {waves} flat {FLAT:d}"
    samples = {f"mlp down {words.format(**t)}": [1.0, 1.0 - (i == at) / 2] for i, t in enumerate(MLP_TILES)}
    assert best_tiles(samples) == {"down": MLP_TILES[at]}


def test_sets_and_bad_jobs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_sets(["plain", "plain", "heads+xsa+pdl"]) == ["plain", "heads+xsa+pdl"] and set(BENCH_JOBS) >= {"kernels", "attention", "trace", "scaling"}
    for args, said in ((("kernels", "", ["heads+quick"], 1, SMALL), "'quick'"), (("attention", "", [], 2, SMALL), "one device"), (("trace", "x.txt", [], 1, {}), "end in .json"), (("scaling", "", [], 3, SMALL), "multiple of 3")):
        with pytest.raises(GolfError, match=said):
            run_timing(*args)
    assert not list(tmp_path.iterdir())


def test_the_scaling_table():
    result = {"samples": {f"{n} ranks {k}": v for n, ms in ((1, 96.0), (2, 50.0), (8, 16.0)) for k, v in
                          {"step": [ms], "forward_backward": [0.9 * ms], "post_backward": [2.0], "ema": [0.1], "block": [ms], "loss of 20 steps (nats)": [7.0, 6.0 + 0.001 * n]}.items()}}
    rows = scaling_table(json.loads(json.dumps(result)))
    assert [r["ranks"] for r in rows] == [1, 2, 8] and rows[2]["speed-up"] == 6.0 and rows[2]["efficiency"] == 0.75
    assert rows[0]["loss apart"] == 0 and abs(rows[2]["loss apart"] - 0.007) < 1e-9 and abs(rows[1]["not forward and backward"] - 0.1) < 1e-9
