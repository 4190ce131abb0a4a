"""`golfnb bench kernels|attention|trace|scaling`: what they find on a CPU, and the sums made of it."""
import json

import pytest
import torch
from tiny import TINY

from golfnb.studies.bench import BenchJob
from golfnb.settings import GolfError
from golfnb.model.engine import Ranks
from golfnb.studies.timing import bench_attention, bench_trace, check_sets, device_events, event_kind, merge_events, scaling_table

SMALL = {**TINY, "MODEL_DIM": "64", "NUM_LAYERS": "2", "TRAIN_SEQ_LEN": "32", "EVAL_SEQ_LEN": "32", "EVAL_STRIDE": "16", "TTT_CHUNK_TOKENS": "128", "VAL_BATCH_SIZE": "4096", "DATA_PATH": "absent"}


def test_attention_is_timed_beside_its_floor():
    samples, unit, facts = bench_attention(BenchJob("attention"), Ranks(), SMALL)
    floors = facts["floors_ms"]
    assert unit == "ms" and samples.keys() == floors.keys() and facts["rates"]["copy"] > 1e6
    assert all(len(v) == 5 and min(v) > 0 for v in samples.values()) and floors["flash, forward+backward"] >= 2 * floors["flash, forward"] > 0


def test_a_trace_tells_every_stream(tmp_path):
    samples, unit, facts = bench_trace(BenchJob("trace", scratch=str(tmp_path), warmup=1), Ranks(), SMALL)
    assert unit == "us" and len({len(v) for v in samples.values()}) == 1 and min(samples["start"]) == 0 and "products" in facts["kinds"]


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


def test_sets():
    assert check_sets(["plain", "plain", "heads+xsa+graph"]) == ["plain", "heads+xsa+graph"] and check_sets([])[0] == "plain"
    with pytest.raises(GolfError, match="'quick'"):
        check_sets(["heads+quick"])


def test_the_scaling_table():
    result = {"samples": {f"{n} ranks {k}": v for n, ms in ((1, 96.0), (2, 50.0), (8, 16.0)) for k, v in
                          {"step": [ms], "forward_backward": [0.9 * ms], "post_backward": [2.0], "ema": [0.1], "block": [ms], "loss of 20 steps (nats)": [7.0, 6.0 + 0.001 * n]}.items()}}
    rows = scaling_table(json.loads(json.dumps(result)))
    assert [r["ranks"] for r in rows] == [1, 2, 8] and rows[2]["speed-up"] == 6.0 and rows[2]["efficiency"] == 0.75
    assert rows[0]["loss apart"] == 0 and abs(rows[2]["loss apart"] - 0.007) < 1e-9 and abs(rows[1]["not forward and backward"] - 0.1) < 1e-9
