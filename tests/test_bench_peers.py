"""`golfnb bench peers` on CPU: contenders in turns, and peers that are missing, broken or there."""
import json
import sys
from dataclasses import replace

import pytest
import torch
from workers import spawn

from golfnb.model.engine import Ranks
from golfnb.settings import GolfError
from golfnb.studies import peers
from golfnb.studies.bench import BENCHES, BenchJob, measure_part, read_result, run_bench
from golfnb.studies.peers import PEERS, Contender, Matrices, clone_commit, read_sizes

CPU = torch.device("cpu")
TINY = Matrices(16, 2, "fp32")
JOB = BenchJob("peers", steps=2, rounds=1, warmup=1, sizes=["16x2"])
OWN = ("golfnb", "torch", "products", "memory")
FAKE = """import torch
def make(blocks):
    return torch.optim.SGD(blocks.parameters(), 0.1).step
"""


@pytest.fixture
def cloned(tmp_path, monkeypatch):
    "A folder with a clone of a fake peer, under the name of a real one."
    clone = tmp_path / "dion"
    (clone / ".git").mkdir(parents=True)
    (clone / ".git" / "HEAD").write_text("0123456789abcdef\n")
    (clone / "fake_peer.py").write_text(FAKE)

    def columns(load, device):
        return {"dion": load("fake_peer").make}

    monkeypatch.setitem(PEERS, "dion", peers.Peer("microsoft/dion", "0" * 12, columns))
    monkeypatch.delitem(sys.modules, "fake_peer", raising=False)
    return tmp_path


def test_the_missing_is_left_out_with_a_sentence_and_the_rest_is_measured(cloned, capsys):
    samples, unit, facts = peers.bench_peers(replace(JOB, peers=str(cloned)), Ranks(), {})
    said = capsys.readouterr().out
    assert "nanochat is left out" in said and PEERS["nanochat"].commit in said
    assert "git clone https://github.com/karpathy/nanochat" in said and "dion is left out" not in said
    wanted = {f"16x2 {dtype} {name}" for dtype in ("fp32", "bf16") for name in (*OWN, "dion")}
    assert samples.keys() == wanted and unit == "ms"
    assert all(len(values) == 2 and min(values) > 0 for values in samples.values())
    assert facts["commits"] == {"dion": "0123456789abcdef"}
    assert facts["left_out"].keys() == {"nanochat"}
    flops = 2 * 5 * (4 * 6 + 2 * 18) * 16 ** 3  # a round takes 4 m m l + 2 m m m
    assert facts["flops"] == {"16x2 fp32": flops, "16x2 bf16": flops}


def test_a_peer_that_fails_is_left_out_and_says_why(cloned):
    def broken(blocks):
        raise ValueError("no such kernel\nmore")

    samples, _, errors = peers.bench_model(JOB, TINY, {"dion": broken}, CPU)
    assert errors == {"dion": "ValueError: no such kernel"} and samples.keys() == set(OWN)
    (cloned / "dion" / "fake_peer.py").write_text("import absent_package")
    columns, left_out = peers.find_peers(cloned, CPU)
    assert not columns and "absent_package" in left_out["dion"]


@pytest.mark.parametrize("build", peers.CONTENDERS.values(), ids=peers.CONTENDERS)
def test_every_matrix_is_stepped_by_muon_and_keeps_its_gradient(build):
    blocks = TINY.build("cpu")
    before = [(p.detach().clone(), p.grad.clone()) for p in blocks.parameters()]
    assert sum(w.numel() for w, _ in before) == TINY.numel and len(before) == 12
    step = build(blocks)
    step()
    for p, (weight, grad) in zip(blocks.parameters(), before, strict=True):
        moved = p - weight * (1 - peers.LR * peers.DECAY)
        size = moved.norm() / min(p.shape) ** 0.5  # of an orthogonal matrix: the learning rate
        assert 0.3 * peers.LR < size < 3 * peers.LR and torch.equal(p.grad, grad)


def test_each_turn_begins_with_the_same_weights():
    seen = []

    def build(blocks):
        seen.append([p.detach().clone() for p in blocks.parameters()])
        return lambda: [p.data.zero_() for p in blocks.parameters()]

    contender = Contender(build, TINY, CPU)
    turns = [contender.turn(1, 3) for _ in range(2)]
    assert [len(turn[""]) for turn in turns] == [3, 3] and contender.memory == {}
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_a_clone_says_its_commit(tmp_path):
    heads = tmp_path / ".git" / "refs" / "heads"
    heads.mkdir(parents=True)
    assert clone_commit(tmp_path) == "unknown"
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (heads / "main").write_text("abc\n")
    assert clone_commit(tmp_path) == "abc"


@pytest.mark.parametrize("word", ["512", "x11", "512x", "0x2", "ax2", "-1x2"])
def test_a_size_that_is_none_is_refused(word):
    with pytest.raises(GolfError, match=f"WIDTHxBLOCKS.*'{word}'"):
        read_sizes(["512x11", word])


def test_on_two_ranks_ours_beside_an_all_reduce_and_the_floor():
    "Every rank takes the same turns; torch's step is that of the mean gradient, and peers are left out by name."
    blocks = TINY.build("cpu")
    for p in blocks.parameters():
        p.grad *= 2
    peers.torch_step(blocks)()
    for series, left_out, weights in spawn(2, "bench_of_peers", module="optimizer_workers"):
        assert series == sorted(f"16x2 {dtype} {name}" for dtype in ("fp32", "bf16") for name in ("golfnb", "torch, all-reduce", "products, shared out", "travel"))
        assert left_out == sorted(PEERS)
        assert max(float((w - p).abs().max()) for w, p in zip(weights, blocks.parameters(), strict=True)) < 1e-5


def test_the_job_writes_a_result(tmp_path, monkeypatch):
    "As `golfnb bench peers` runs it, but in this process."
    def here(words, nproc, settings):
        measure_part(BenchJob(**json.loads(words[1])), Ranks(), settings)
        return 0

    monkeypatch.setattr("golfnb.studies.bench.launch_module", here)
    out = tmp_path / "optimizer_peers_cpu.json"
    job = replace(JOB, out=str(out), peers=str(tmp_path / "none"))
    assert run_bench(job, 1, {}) == 0
    found = read_result(out.stem, tmp_path)
    assert found["facts"]["left_out"].keys() == set(PEERS) and found["versions"]["torch"]
    assert "16x2 bf16 golfnb" in found["samples"]
    assert set(BENCHES["peers"][1].split()) <= vars(job).keys()
