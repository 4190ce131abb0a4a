"""Samplers and loader: every block once a pass, one plan on every rank, exact restoring, errors and shutdown of the thread."""
import json
import math
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from golfnb.config import GolfError, load_config
from golfnb.loader import CoprimeSampler, Loader, SequentialSampler, draw_cursor, make_sampler, mixture
from golfnb.shards import write_shard

PLACES = torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])


def corpus(folder, lengths):
    "Shards whose tokens count on from 0, so that a token is its place in the joined stream."
    ends = np.cumsum(lengths)
    paths = [folder / f"x_train_{i:06d}.bin" for i in range(len(lengths))]
    for path, end, n in zip(paths, ends, lengths):
        write_shard(path, np.arange(end - n, end) % 65_536)
    return paths


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus"), [3000, 700, 5200, 64, 1900])


@given(tokens=st.integers(2, 3000), seq_len=st.integers(1, 200), seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_a_pass_visits_every_block_once(tokens, seq_len, seed):
    if tokens <= seq_len:
        return
    cursor = draw_cursor(np.random.default_rng(seed), tokens, seq_len)
    assert 0 <= cursor.phase <= min(seq_len - 1, tokens - seq_len - 1)
    assert cursor.blocks == (tokens - 1 - cursor.phase) // seq_len >= 1
    assert math.gcd(cursor.stride, cursor.blocks) == 1
    places = [cursor.take(seq_len) for _ in range(cursor.blocks)]
    assert sorted(places) == [cursor.phase + b * seq_len for b in range(cursor.blocks)]
    assert places and max(places) + seq_len < tokens


@given(lengths=st.lists(st.integers(10, 400), min_size=1, max_size=12), rows=st.integers(1, 9), world=st.integers(1, 4), seed=st.integers(0, 999))
@settings(max_examples=60, deadline=None)
def test_coverage_across_passes_and_batches(tmp_path_factory, lengths, rows, world, seed):
    "No block comes twice before its shard's pass is over, whatever the mixture and wherever batches end."
    folder, seq_len = tmp_path_factory.mktemp("c"), 16
    paths = corpus(folder, lengths)
    if max(lengths) <= seq_len:
        with pytest.raises(GolfError, match="more than TRAIN_SEQ_LEN"):
            CoprimeSampler(paths, 0, world, rows, seq_len, seed)
        return
    sampler = CoprimeSampler(paths, 0, world, rows, seq_len, seed)
    for _ in range(min(60, max(3, 3 * sum(lengths) // seq_len // (rows * world)))):
        before = {s: sampler.cursors[s] for s in sampler.usable}
        used = {s: c.used if c else 0 for s, c in before.items()}
        plan = sampler.plan()
        assert len(plan) == rows * world
        for s in sampler.usable:
            now = Counter(at for shard, at in plan if shard == s)
            cursor = sampler.cursors[s]
            if cursor is before[s] and cursor is not None: # same pass all through the batch: exactly the next blocks of the walk
                expected = [cursor.phase + (cursor.start + i * cursor.stride) % cursor.blocks * seq_len for i in range(used[s], cursor.used)]
                assert now == Counter(expected)
            elif before[s] is not None: # the old pass was used up before a new one began
                assert before[s].used == before[s].blocks
            assert all(0 <= at and at + seq_len < lengths[s] for at in now)


def test_single_shard_passes_in_full(tmp_path):
    sampler = CoprimeSampler(corpus(tmp_path, [999]), 0, 1, 1, 10, seed=4)
    for _ in range(5):
        first = sampler.plan()[0][1]
        cursor = sampler.cursors[0]
        places = [first] + [sampler.plan()[0][1] for _ in range(cursor.blocks - 1)]
        assert sampler.cursors[0] is cursor and sorted(places) == [cursor.phase + 10 * b for b in range(cursor.blocks)]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_same_plan_on_every_rank(paths, world):
    ranks = [CoprimeSampler(paths, r, world, 6, 32, seed=11) for r in range(world)]
    whole = CoprimeSampler(paths, 0, world, 6, 32, seed=11)
    for _ in range(12):
        plan = whole.plan()
        parts = [s.next() for s in ranks]
        assert all(part.shape == (6, 33) and part.dtype == np.uint16 for part in parts)
        for rank, sampler in enumerate(ranks):
            assert sampler.mine == plan[rank::world]
            assert sampler.state() == whole.state()
    assert CoprimeSampler(paths, 0, world, 6, 32, seed=12).plan() != CoprimeSampler(paths, 0, world, 6, 32, seed=11).plan()


def test_plan_does_not_depend_on_paths(tmp_path):
    plans = []
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
        plans.append(CoprimeSampler(corpus(tmp_path / name, [500, 900]), 0, 1, 8, 32, seed=1).plan())
    assert plans[0] == plans[1]


def test_mixture_follows_its_schedule():
    assert mixture(0, 100, 384, 8) == (8, 0.9)
    assert mixture(900, 100, 384, 8) == (36, pytest.approx(0.7))
    assert mixture(1800, 100, 384, 8) == mixture(10**6, 100, 384, 8) == (64, 0.5)
    assert mixture(1800, 100, 384, 1)[0] == 32 and mixture(0, 100, 384, 16)[0] == 16
    assert mixture(0, 3, 384, 8)[0] == 3 and mixture(1800, 100, 5, 1)[0] == 5


def test_guaranteed_window_and_breadth(tmp_path):
    "Every drawn shard gives at least one window, and the number of shards is the mixture's."
    sampler = CoprimeSampler(corpus(tmp_path, [400] * 20), 0, 1, 40, 16, seed=2)
    for batch in range(30):
        assert len({shard for shard, _ in sampler.plan()}) == mixture(batch, 20, 40, 1)[0]


@pytest.mark.parametrize("cls, more", [(SequentialSampler, ()), (CoprimeSampler, (5,))])
def test_state_survives_json(paths, cls, more):
    sampler = cls(paths, 1, 2, 5, 48, *more)
    for _ in range(7):
        sampler.next()
    saved = json.loads(json.dumps(sampler.state()))
    expected = [sampler.next() for _ in range(20)]
    other = cls(paths, 1, 2, 5, 48, *((99,) if more else ()))
    other.load_state(saved)
    assert all((a == b).all() for a, b in zip(expected, [other.next() for _ in range(20)]))
    with pytest.raises(GolfError, match="corpus"):
        cls(paths[:2], 1, 2, 5, 48, *more).load_state(saved)
    with pytest.raises(GolfError, match="corpus"):
        cls(paths, 1, 2, 5, 47, *more).load_state(saved)


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5), world=st.integers(1, 4), rows=st.integers(1, 4), seq_len=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_sequential_against_the_joined_stream(tmp_path_factory, lengths, world, rows, seq_len):
    "Ranks side by side give the endless joined stream, across shard ends, ranks and the wrap at the end."
    paths, span = corpus(tmp_path_factory.mktemp("s"), lengths), rows * seq_len + 1
    stream = np.tile(np.arange(sum(lengths)), 1 + 6 * world * span // sum(lengths))
    samplers = [SequentialSampler(paths, r, world, rows, seq_len) for r in range(world)]
    at = 0
    for _ in range(4):
        for sampler in samplers:
            batch = sampler.next()
            want = stream[at : at + span]
            assert (batch[:, :-1].reshape(-1) == want[:-1]).all() and (batch[:, 1:].reshape(-1) == want[1:]).all()
            at += span


def test_make_sampler_follows_the_config(tmp_path):
    paths = corpus(tmp_path, [9000, 9000])
    demo = load_config({"RECIPE": "demo", "SEED": "3"})
    sampler = make_sampler(demo, paths, 1, 2)
    assert isinstance(sampler, CoprimeSampler) and sampler.rows == demo.rows_per_micro(2)
    assert sampler.plan() == CoprimeSampler(paths, 0, 2, sampler.rows, demo.train_seq_len, 3).plan()
    assert isinstance(make_sampler(load_config({"RECIPE": "demo", "LOADER": "sequential"}), paths, 0, 1), SequentialSampler)


@pytest.mark.parametrize("device", PLACES, ids=str)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_loader_gives_the_samplers_batches(paths, device, depth):
    plain = CoprimeSampler(paths, 0, 1, 6, 32, seed=8)
    with Loader(CoprimeSampler(paths, 0, 1, 6, 32, seed=8), device, 65_536, depth) as loader:
        kept = []
        for _ in range(25):
            ids, targets = loader.next()
            rows = torch.from_numpy(plain.next().astype(np.int64))
            kept.append((ids, targets, rows))
            assert loader.state() == plain.state()
    for ids, targets, rows in kept: # compared late: batches must not be overwritten by later ones
        assert ids.device.type == device.type and ids.dtype == targets.dtype == torch.int64
        assert torch.equal(ids.cpu(), rows[:, :-1]) and torch.equal(targets.cpu(), rows[:, 1:])


@pytest.mark.parametrize("device", PLACES, ids=str)
def test_large_tokens_keep_their_value(tmp_path, device):
    write_shard(tmp_path / "a.bin", [65_535, 32_768, 32_767, 1, 0])
    with Loader(SequentialSampler([tmp_path / "a.bin"], 0, 1, 1, 4), device, 65_536) as loader:
        ids, targets = loader.next()
    assert ids.tolist() == [[65_535, 32_768, 32_767, 1]] and targets.tolist() == [[32_768, 32_767, 1, 0]]


@pytest.mark.parametrize("device", PLACES, ids=str)
def test_rewind_restores_exactly(paths, device):
    with Loader(CoprimeSampler(paths, 0, 1, 6, 32, seed=8), device, 65_536) as loader:
        start = json.loads(json.dumps(loader.state()))
        first = [loader.next()[0].clone() for _ in range(5)]
        middle = loader.state()
        later = [loader.next()[0].clone() for _ in range(5)]
        loader.rewind(middle)
        assert all(torch.equal(loader.next()[0], x) for x in later)
        loader.load_state(start)
        assert all(torch.equal(loader.next()[0], x) for x in first)
    loader.rewind(start) # a closed loader opens again
    assert torch.equal(loader.next()[0], first[0])
    loader.close()


class Breaks(SequentialSampler):
    "A sampler that fails at its third batch."
    def next(self):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 3:
            raise RuntimeError("the disk went away")
        return super().next()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("device", PLACES, ids=str)
def test_error_in_the_thread_reaches_next(paths, device):
    with Loader(Breaks(paths, 0, 1, 2, 8), device, 65_536) as loader:
        loader.next(), loader.next()
        for _ in range(3):
            with pytest.raises(RuntimeError, match="disk went away"):
                loader.next()


@pytest.mark.timeout(20)
def test_token_outside_the_vocabulary_names_the_shard(tmp_path):
    write_shard(tmp_path / "good.bin", [1] * 300)
    write_shard(tmp_path / "bad.bin", [1] * 200 + [1024] + [1] * 99)
    for order, more in ((SequentialSampler, ()), (CoprimeSampler, (1,))):
        with Loader(order([tmp_path / "good.bin", tmp_path / "bad.bin"], 0, 1, 2, 16, *more), "cpu", 1024) as loader:
            with pytest.raises(GolfError, match=r"VOCAB_SIZE=1024, found 1024 in .*bad\.bin"):
                for _ in range(60):
                    loader.next()


@pytest.mark.timeout(20)
def test_close_ends_the_thread_and_the_queue_is_bounded(paths):
    class Counts(SequentialSampler):
        built = 0
        def next(self):
            self.built += 1
            return super().next()
    sampler = Counts(paths, 0, 1, 2, 8)
    loader = Loader(sampler, "cpu", 65_536, depth=3)
    end = time.time() + 5
    while sampler.built < 3 and time.time() < end:
        time.sleep(0.01)
    time.sleep(0.05)
    assert sampler.built == 3, "never more than depth batches ahead"
    loader.close(), loader.close()
    assert not [t for t in threading.enumerate() if t.name == "golfnb-feeder"]
    with pytest.raises(GolfError, match="closed"):
        loader.next()
