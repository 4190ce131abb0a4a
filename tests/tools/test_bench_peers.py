"""`golfnb bench peers` on CPU: contenders in turns, and peers that are missing, broken or there."""
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from workers import spawn

from golfnb.model.engine import Ranks
from golfnb.settings import GolfError
from golfnb.studies import peers
from golfnb.studies.bench import BENCHES, BenchJob, measure_part, run_bench
from golfnb.tools.results import read_result
from golfnb.studies.peers import PEERS, Contender, Matrices, Way, clone_commit, read_sizes

CPU = torch.device("cpu")
TINY = Matrices(16, 2, "fp32")
JOB = BenchJob("peers", steps=2, rounds=1, warmup=1, sizes=["16x2"])
STEPS = ("golfnb", "torch", "products", "memory")
SERIES = (*STEPS, *(f"{name} host" for name in STEPS), *(f"{name} training" for name in ("golfnb", "torch", "no optimizer")))
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

    def ways(load, device):
        return {"dion": Way(load("fake_peer").make)}

    monkeypatch.setitem(PEERS, "dion", peers.Peer("microsoft/dion", "0" * 12, ways))
    monkeypatch.delitem(sys.modules, "fake_peer", raising=False)
    return tmp_path


def test_the_missing_is_left_out_with_a_sentence_and_the_rest_is_measured(cloned, capsys):
    samples, unit, facts = peers.bench_peers(replace(JOB, peers=str(cloned)), Ranks(), {})
    said = capsys.readouterr().out
    assert "nanochat is left out" in said and PEERS["nanochat"].commit in said
    assert "git clone https://github.com/karpathy/nanochat" in said and "dion is left out" not in said
    wanted = {f"16x2 {dtype} {name}" for dtype in ("fp32", "bf16") for name in (*SERIES, "dion", "dion host", "dion training")}
    assert samples.keys() == wanted and unit == "ms"
    assert all(len(values) == 2 and min(values) > 0 for values in samples.values())
    assert facts["commits"] == {"dion": "0123456789abcdef"}
    assert facts["left_out"].keys() == {"nanochat"}
    flops = 2 * 5 * (4 * 6 + 2 * 18) * 16 ** 3  # a round takes 4 m m l + 2 m m m
    assert facts["flops"] == {"16x2 fp32": flops, "16x2 bf16": flops}


def test_a_peer_that_fails_is_left_out_and_says_why(cloned):
    def broken(blocks):
        raise ValueError("no such kernel\nmore")

    samples, _, errors = peers.bench_model(JOB, TINY, {"dion": Way(broken)}, CPU)
    assert errors == {"dion": "ValueError: no such kernel"} and samples.keys() == set(SERIES)
    (cloned / "dion" / "fake_peer.py").write_text("import absent_package")
    ways, left_out = peers.find_peers(cloned, CPU)
    assert not ways and "absent_package" in left_out["dion"]


@pytest.mark.parametrize("name", ["golfnb", "torch"])
def test_every_matrix_is_stepped_by_muon_and_keeps_its_gradient(name):
    blocks = TINY.build("cpu")
    before = [(p.detach().clone(), p.grad.clone()) for p in blocks.parameters()]
    assert sum(w.numel() for w, _ in before) == TINY.numel and len(before) == 12
    peers.own_ways(CPU)[name].build(blocks)()
    for p, (weight, grad) in zip(blocks.parameters(), before, strict=True):
        moved = p - weight * (1 - peers.LR * peers.DECAY)
        size = moved.norm() / min(p.shape) ** 0.5  # of an orthogonal matrix: the learning rate
        assert 0.3 * peers.LR < size < 3 * peers.LR and torch.equal(p.grad, grad)


def test_each_turn_begins_with_the_same_weights():
    seen = []

    def build(blocks):
        seen.append([p.detach().clone() for p in blocks.parameters()])
        return lambda: [p.data.zero_() for p in blocks.parameters()]

    contender = Contender(Way(build), TINY, CPU)
    turns = [contender.turn(1, 3) for _ in range(2)]
    assert [{kind: len(ms) for kind, ms in turn.items()} for turn in turns] == 2 * [{"": 3, "host": 3, "training": 3}]
    assert contender.memory == {} and not contender.recorded
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


def test_every_matrix_has_its_part_in_what_the_blocks_compute():
    blocks = TINY.build("cpu")
    before = [p.grad for p in blocks.parameters()]
    for fixed in (True, False):
        peers.training_step(Way(peers.torch_step, fixed=fixed), blocks, peers.nothing)()
        assert all(p.grad.abs().min() >= 0 and p.grad.abs().max() > 0 for p in blocks.parameters())
        assert [p.grad is grad for p, grad in zip(blocks.parameters(), before, strict=True)] == 12 * [fixed]


def test_on_two_ranks_a_step_is_that_of_the_mean_gradient():
    ranks = spawn(2, "peers_on_ranks", module="optimizer_workers")
    for name in ("golfnb", "torch"):
        blocks = TINY.build("cpu")
        for p, first, second in zip(blocks.parameters(), ranks[0]["grads"], ranks[1]["grads"], strict=True):
            assert not torch.equal(first, second)
            p.grad = (first + second) / 2
        peers.own_ways(CPU)[name].build(blocks)()
        for rank in ranks:
            assert max(float((w - p).abs().max()) for w, p in zip(rank[name], blocks.parameters(), strict=True)) < 1e-5


NANOCHAT = """import torch
import torch.distributed as dist

class MuonAdamW(torch.optim.SGD):
    "Sums up gradients itself; wants those of each rank."
    def __init__(self, groups):
        assert {group["kind"] for group in groups} == {"muon"}
        super().__init__([p for group in groups for p in group["params"]], 0.1)

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            mean = p.grad.clone()
            dist.all_reduce(mean)
            assert not torch.equal(mean, 2 * p.grad), "gradients are means already"
            p -= 0.1 * mean
"""
DION = """import torch
import torch.distributed as dist

class Muon(torch.optim.SGD):
    "Wants mean gradients."
    def __init__(self, params, distributed_mesh=None, lr=0.1, mu=0.9, weight_decay=0.0, nesterov=False, use_triton=False):
        assert distributed_mesh is dist.group.WORLD
        super().__init__(params, lr)

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            both = p.grad.clone()
            dist.all_reduce(both)
            assert torch.equal(both, 2 * p.grad), "gradients are not means"
            p -= 0.1 * p.grad
"""
FAILING = """import torch.distributed as dist

class Muon:
    def __init__(self, *args, **how):
        assert dist.get_rank() == 0, "this rank cannot"

    def step(self):
        pass
"""


@pytest.mark.parametrize("dion", [DION, FAILING], ids=["works", "fails on one rank"])
def test_the_command_measures_all_on_two_ranks(tmp_path, dion):
    "As it is typed: peers get the gradients that they ask for, and one that fails anywhere is left out everywhere."
    for name, module, text in (("nanochat", "nanochat/optim.py", NANOCHAT), ("dion", "dion/__init__.py", dion)):
        place = tmp_path / "peers" / name / module
        place.parent.mkdir(parents=True)
        place.write_text(text)
    out = tmp_path / "peers_cpu_2.json"
    words = ["bench", "peers", "--nproc", "2", "--sizes", "16x2", "--steps", "3", "--rounds", "1", "--warmup", "1", "--peers", str(tmp_path / "peers"), "-o", str(out)]
    done = subprocess.run([sys.executable, "-m", "golfnb", *words], capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_result(out.stem, tmp_path)
    works = dion is DION
    names = ["golfnb", "torch", "nanochat", *["dion"] * works]
    steps = [*names, "products", "travel"]
    series = [*steps, *(f"{name} host" for name in steps), *(f"{name} training" for name in (*names, "no optimizer"))]
    assert found["samples"].keys() == {f"16x2 {dtype} {name}" for dtype in ("fp32", "bf16") for name in series}
    assert all(len(ms) == 3 and min(ms) > 0 for ms in found["samples"].values())
    left_out = found["facts"]["left_out"]
    assert left_out == ({} if works else {f"16x2 {dtype} dion": "AssertionError: this rank cannot" for dtype in ("fp32", "bf16")})
    assert not any(found["facts"]["recorded"].values()) and found["facts"]["world"] == 2


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
