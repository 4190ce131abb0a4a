"""Samplers and loader: every block once a pass, one plan on every rank, exact restoring, errors and shutdown of the thread."""
import json
import math
import sys
import subprocess
import os
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from golfnb.settings import GolfError
from golfnb.text.loader import CoprimeSampler, Loader, SequentialSampler, WindowSampler, draw_cursor, mixture
from golfnb.text.shards import write_shard
from golfnb.model.engine import Ranks
from golfnb.studies.packed import PackedSampler, index_documents
from golfnb.studies.variants import read_variant

ORDERS = ((SequentialSampler, ()), (CoprimeSampler, (5,)), (PackedSampler, (5,)))
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
        with pytest.raises(GolfError, match="TRAIN_SEQ_LEN=16"):
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
        parts = [next(s) for s in ranks]
        for rank, (part, sampler) in enumerate(zip(parts, ranks)):
            assert part.shape == (6, 33) and part.dtype == np.uint16
            assert all((row == sampler.read(shard, at, 33)).all() for row, (shard, at) in zip(part, plan[rank::world], strict=True))
            assert sampler.state() == whole.state()
    assert CoprimeSampler(paths, 0, world, 6, 32, seed=12).plan() != CoprimeSampler(paths, 0, world, 6, 32, seed=11).plan()


def test_plan_does_not_depend_on_paths(tmp_path):
    plans = []
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
        plans.append(CoprimeSampler(corpus(tmp_path / name, [500, 900]), 0, 1, 8, 32, seed=1).plan())
    assert plans[0] == plans[1]


def test_mixture_follows_its_schedule():
    assert mixture(0, 100, 384) == (8, 0.9)
    assert mixture(900, 100, 384) == (36, pytest.approx(0.7))
    assert mixture(1800, 100, 384) == mixture(10**6, 100, 384) == (64, 0.5)
    assert mixture(0, 3, 384)[0] == 3 and mixture(1800, 100, 5)[0] == 5


def test_guaranteed_window_and_breadth(tmp_path):
    "Every drawn shard gives at least one window, and the number of shards is the mixture's."
    sampler = CoprimeSampler(corpus(tmp_path, [400] * 20), 0, 1, 40, 16, seed=2)
    for batch in range(30):
        assert len({shard for shard, _ in sampler.plan()}) == mixture(batch, 20, 40)[0]


def test_a_state_of_another_corpus_is_refused(paths):
    for order, more in ORDERS:
        saved = order(paths, 1, 2, 5, 48, *more).state()
        for other in (order(paths[:2], 1, 2, 5, 48, *more), order(paths, 1, 2, 5, 47, *more)):
            with pytest.raises(GolfError, match="corpus"):
                other.load_state(saved)
    with pytest.raises(GolfError, match="order"):
        SequentialSampler(paths, 1, 2, 5, 48).load_state(saved)


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
            batch = next(sampler)
            want = stream[at : at + span]
            assert (batch[:, :-1].reshape(-1) == want[:-1]).all() and (batch[:, 1:].reshape(-1) == want[1:]).all()
            at += span


def test_a_programs_data_follows_its_settings(tmp_path):
    "Each order that LOADER names, on the second of two ranks."
    paths = corpus(tmp_path, [9000, 9000])
    write_shard(paths[0], np.arange(1, 9001))  # where documents matter, the first begins with a BOS
    demo = read_variant({"RECIPE": "demo", "SEED": "3", "VOCAB_SIZE": "20000"})
    seq_len = demo.settings.train_seq_len
    sizes = paths, 1, 2, demo.settings.rows_per_micro(2, seq_len), seq_len
    orders = {"sequential": SequentialSampler(*sizes, 4, spans=8), "coprime": CoprimeSampler(*sizes, 3, 4), "packed": PackedSampler(*sizes, 3, 4)}
    for word, sampler in orders.items():
        with demo.exchange(LOADER=word).loader(paths, Ranks(1, 2)) as loader:
            for _ in range(9):
                batch, rows = next(loader), torch.from_numpy(next(sampler).astype(np.int64))
                assert torch.equal(batch.ids, rows[:, :-1]) and torch.equal(batch.targets, rows[:, 1:]), word


def test_a_token_of_the_stream_is_found(tmp_path):
    "At both ends of every shard, and round again after the last."
    lengths = [3, 1, 2, 3]
    sampler = SequentialSampler(corpus(tmp_path, lengths), 0, 1, 1, 2)
    want = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]
    assert [sampler.locate(position) for position in range(18)] == want + want
    assert [sampler.window(at).tolist() for at in (0, 2, 7)] == [[0, 1, 2], [2, 3, 4], [7, 8, 0]]


def test_an_order_of_ones_own_needs_what_its_docstring_lists(paths):
    class Backwards(WindowSampler):
        order = "backwards"
        at = 0

        def plan(self):
            self.at += self.windows
            return range(self.at - self.windows, self.at)

        def window(self, place):
            return self.read(0, 100 - place, self.seq_len + 1)

        def place(self): return {"at": self.at}
        def go_to(self, place): self.at = place["at"]

    with Loader(Backwards(paths, 1, 2, 3, 4, accum=2), "cpu", 65_536) as loader:
        start, first, middle, second = loader.state(), next(loader), loader.state(), next(loader)
        assert [row[0] for row in first.ids.tolist()] == [99, 95, 91] and [row[0] for row in second.ids.tolist()] == [97, 93, 89]
        for state, batch in ((start, first), (middle, second)):
            loader.rewind(json.loads(json.dumps(state)))
            assert torch.equal(next(loader).ids, batch.ids)


def random_order(**parts) -> type:
    "An order of windows at random places, but for some `parts`; None: it lacks that one."
    def start(self, *given):
        WindowSampler.__init__(self, *given)
        self.rng = np.random.default_rng(1)

    whole = {"order": "random", "__init__": start, "window": lambda self, begin: self.read(0, begin, self.seq_len + 1),
             "plan": lambda self: self.rng.integers(self.tokens[0] - self.seq_len, size=self.windows).tolist(),
             "place": lambda self: {"rng": self.rng.bit_generator.state}, "go_to": lambda self, place: setattr(self.rng.bit_generator, "state", place["rng"])}
    return type("Mine", (WindowSampler,), {name: part for name, part in (whole | parts).items() if part is not None})


def later(self):
    "A place that JSON can hold at the start, and no more after a step."
    return {"at": 0 if self.rng.bit_generator.state == np.random.default_rng(1).bit_generator.state else np.int64(7)}


FAULTY = {  # what is wrong -> (the parts, what the sentence says)
    **{f"no {part}": ({part: None}, f"Mine .*found no {part}") for part in ("order", "plan", "window", "place", "go_to")},
    "a place that JSON cannot hold": ({"place": lambda self: {"at": np.zeros(2)}}, "place.. of Mine .*JSON .*ndarray"),
    "a place that JSON cannot hold later": ({"place": later}, "place.. of Mine .*JSON .*int64"),
    "no window at all": ({"plan": lambda self: []}, "plan of Mine .*the 12 windows .*found 0"),
    "too many windows": ({"plan": lambda self: [0] * 13}, "plan of Mine .*the 12 windows .*found 13"),
    "an order over nothing": ({"plan": lambda self: [3 % 0]}, "Mine .*ZeroDivisionError"),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_order_is_refused_before_anything_is_read(paths, fault):
    parts, words = FAULTY[fault]
    before = threading.active_count()
    with pytest.raises(GolfError, match=words) as raised:
        Loader(random_order(**parts)(paths, 0, 2, 3, 4, 2), "cpu", 65_536)
    assert "\n" not in str(raised.value) and threading.active_count() == before
    with pytest.raises(GolfError, match="shards"):
        SequentialSampler([], 0, 1, 2, 8)


WRONG_SIZES = {"rank": (2, -1), "world": (0,), "rows": (0,), "seq_len": (0,), "accum": (0,), "seed": (-1,)}


@pytest.mark.parametrize("order", [order for order, _ in ORDERS])
@pytest.mark.parametrize("word", WRONG_SIZES)
def test_a_sampler_refuses_what_it_cannot_deal_out(paths, order, word):
    usual = {"rank": 0, "world": 2, "rows": 3, "seq_len": 16, "accum": 1}
    if order is not SequentialSampler:
        usual["seed"] = 5
    elif word == "seed":
        return
    order(paths, **usual)
    for wrong in WRONG_SIZES[word]:
        with pytest.raises(GolfError, match=f"found.*{wrong}") as raised:
            order(paths, **usual | {word: wrong})
        assert word in str(raised.value)


def test_trying_an_order_leaves_it_where_it_is(paths):
    orders = [random_order()(paths, 0, 1, 4, 16)] + [order(paths, 0, 1, 4, 16, *more) for order, more in ORDERS]
    plain = [random_order()(paths, 0, 1, 4, 16)] + [order(paths, 0, 1, 4, 16, *more) for order, more in ORDERS]
    for tried, other in zip(orders, plain, strict=True):
        for _ in range(3):
            tried.check()
            assert (next(tried) == next(other)).all()


@pytest.mark.parametrize("device", PLACES, ids=str)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_loader_gives_the_samplers_batches(paths, device, depth):
    plain = CoprimeSampler(paths, 0, 1, 6, 32, seed=8)
    with Loader(CoprimeSampler(paths, 0, 1, 6, 32, seed=8), device, 65_536, depth) as loader:
        kept = []
        for _ in range(25):
            kept.append((next(loader), torch.from_numpy(next(plain).astype(np.int64))))
            assert loader.state() == plain.state()
    for batch, rows in kept: # compared late: batches must not be overwritten by later ones
        assert batch.ids.device.type == device.type and batch.ids.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.ids.cpu(), rows[:, :-1]) and torch.equal(batch.targets.cpu(), rows[:, 1:])


@pytest.mark.parametrize("device", PLACES, ids=str)
def test_large_tokens_keep_their_value(tmp_path, device):
    write_shard(tmp_path / "a.bin", [65_535, 32_768, 32_767, 1, 0])
    with Loader(SequentialSampler([tmp_path / "a.bin"], 0, 1, 1, 4), device, 65_536) as loader:
        batch = next(loader)
    assert batch.ids.tolist() == [[65_535, 32_768, 32_767, 1]] and batch.targets.tolist() == [[32_768, 32_767, 1, 0]]


@pytest.mark.parametrize("device", PLACES, ids=str)
def test_rewind_restores_exactly(paths, device):
    with Loader(CoprimeSampler(paths, 0, 1, 6, 32, seed=8), device, 65_536) as loader:
        start = json.loads(json.dumps(loader.state()))
        first = [next(loader).ids.clone() for _ in range(5)]
        middle = loader.state()
        later = [next(loader).ids.clone() for _ in range(5)]
        loader.rewind(middle)
        assert all(torch.equal(next(loader).ids, x) for x in later)
        loader.rewind(start)
        assert all(torch.equal(next(loader).ids, x) for x in first)
    loader.rewind(start) # a closed loader opens again
    assert torch.equal(next(loader).ids, first[0])
    loader.close()


class Breaks(SequentialSampler):
    "A sampler that fails at its third batch."
    calls = 0

    def __next__(self):
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("the disk went away")
        return super().__next__()


@pytest.mark.parametrize("device", PLACES, ids=str)
def test_error_in_the_thread_reaches_next(paths, device):
    with Loader(Breaks(paths, 0, 1, 2, 8), device, 65_536) as loader:
        next(loader), next(loader)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="disk went away"):
                next(loader)


def test_token_outside_the_vocabulary_names_the_shard(tmp_path):
    write_shard(tmp_path / "good.bin", [1] * 300)
    write_shard(tmp_path / "bad.bin", [1] * 200 + [1024] + [1] * 99)
    for order, more in ((SequentialSampler, ()), (CoprimeSampler, (1,))):
        with Loader(order([tmp_path / "good.bin", tmp_path / "bad.bin"], 0, 1, 2, 16, *more), "cpu", 1024) as loader:
            with pytest.raises(GolfError, match=r"bad\.bin .*VOCAB_SIZE=1024, found 1024: "):
                for _ in range(60):
                    next(loader)


def test_close_ends_the_thread_and_the_queue_is_bounded(paths):
    class Counts(SequentialSampler):
        built = 0
        def __next__(self):
            self.built += 1
            return super().__next__()
    sampler = Counts(paths, 0, 1, 2, 8)
    loader = Loader(sampler, "cpu", 65_536, depth=3)
    while sampler.built < 3:
        time.sleep(0.01)
    time.sleep(0.05)
    assert sampler.built == 3, "never more than depth batches ahead"
    loader.close(), loader.close()
    assert not [t for t in threading.enumerate() if t.name == "golfnb-feeder"]
    with pytest.raises(GolfError, match="closed"):
        next(loader)


def written(folder, shards):
    "Shards of given tokens."
    for i, tokens in enumerate(shards):
        write_shard(folder / f"p_train_{i:06d}.bin", tokens)
    return [folder / f"p_train_{i:06d}.bin" for i in range(len(shards))]


@given(data=st.data(), seq_len=st.integers(1, 40), world=st.integers(1, 8), rows=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_packed_rows_hold_every_token_of_text_once_a_pass(tmp_path_factory, data, seq_len, world, rows, seed):
    "Texts cut at any shard edge, documents without text, shards shorter than a row: each token is a target once, rows begin with a BOS, ranks are disjoint."
    lengths = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=12))
    stream, number = [], 2
    for n in lengths: # every token of text has a number of its own
        stream += [1, *range(number, number + n)]
        number += n
    cuts = sorted(data.draw(st.lists(st.integers(1, max(1, len(stream) - 1)), max_size=6, unique=True)))
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)]) if b > a]
    paths = written(tmp_path_factory.mktemp("p"), parts)
    samplers = [PackedSampler(paths, r, world, rows, seq_len, seed) for r in range(world)]
    seen, row_count = [], 0
    while len(seen) < 2 * (number - 2) and row_count < 4000: # two passes and a bit, in the order of the stream
        batches = [next(s) for s in samplers]
        assert all(s.place() == samplers[0].place() for s in samplers)
        for i in range(rows * world): # rows were dealt to ranks in turn
            row = batches[i % world][i // world]
            assert row[0] == 1 and row.size == seq_len + 1
            seen += [t for t in row[1:].tolist() if t != 1]
            row_count += 1
        if number == 2:
            return
    once = set(range(2, number))
    for lap in range(2):
        part = seen[lap * len(once) : (lap + 1) * len(once)]
        assert len(set(part)) == len(part) and set(part) == once


def test_packed_documents_stay_together(tmp_path):
    docs = [[1, *range(10 * d, 10 * d + d % 7)] for d in range(1, 40)]
    sampler, whole = PackedSampler(written(tmp_path, [sum(docs[:25], []), sum(docs[25:], [])]), 0, 1, 4, 32, seed=1), {tuple(d[1:]) for d in docs}
    for _ in range(3):
        for row in next(sampler)[:, :-1]:
            inner = [tuple(row[a:a + n].tolist()) for a, n in zip(*index_documents(row))][1:-1]
            assert inner and set(inner) <= whole, "a document that neither begins nor ends its row is whole"
    assert index_documents(np.array([9, 9], np.uint16))[1].tolist() == [2] and index_documents(np.array([1], np.uint16))[1].tolist() == [0]


@pytest.mark.parametrize("order", [order for order, _ in ORDERS])
def test_the_windows_of_a_step_are_the_same_on_any_number_of_ranks(paths, order):
    "Whatever number of ranks and micro-batches share it; and a place between two steps fits every number of ranks."
    place, windows = None, 840 # on 1 to 8 ranks
    for step in range(3):
        steps, places = [], []
        for world in range(1, 9):
            accum = max(1, 8 // world)
            last = {"spans": 8} if order is SequentialSampler else {"seed": 5}
            samplers = [order(paths, rank, world, windows // (world * accum), 4, accum=accum, **last) for rank in range(world)]
            if place:
                [s.load_state(place) for s in samplers]
            rows = np.concatenate([next(s) for _ in range(samplers[0].accum) for s in samplers])
            steps.append(Counter(map(bytes, rows)))
            places += [json.loads(json.dumps(s.state())) for s in samplers]
        assert all(s == steps[0] and s.total() == 840 for s in steps) and all(p == places[0] for p in places)
        place = places[0]


@given(lengths=st.lists(st.integers(3, 90), min_size=1, max_size=9), world=st.integers(1, 8), rows=st.integers(1, 3), seq_len=st.integers(1, 24),
       steps=st.integers(0, 25), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_resume_in_the_middle_of_a_pass_on_every_rank(tmp_path_factory, lengths, world, rows, seq_len, steps, seed):
    "Odd shard sizes and shards shorter than a window included: after JSON, another mount point and another seed, the same rows."
    here, there = (corpus(tmp_path_factory.mktemp(name), lengths) for name in ("here", "there"))
    for order, more in ORDERS:
        if order is CoprimeSampler and max(lengths) <= seq_len:
            continue
        ranks, again = ([order(paths, r, world, rows, seq_len, *(seed + n for _ in more), accum=1 + seed % 3) for r in range(world)] for paths, n in ((here, 0), (there, 1)))
        for _ in range(steps):
            [next(s) for s in ranks]
        saved = [json.loads(json.dumps(s.state())) for s in ranks]
        assert all(state == saved[0] for state in saved), "one state for all ranks"
        for sampler in again:
            sampler.load_state(saved[0])
        for _ in range(4):
            assert all((next(a) == next(b)).all() for a, b in zip(ranks, again))


@pytest.mark.parametrize("world", range(1, 9))
def test_ranks_are_disjoint_and_cover_the_plan(tmp_path, world):
    "One pass over one shard of world * 3 windows a batch: every block once, no block on two ranks, at every world size."
    seq_len, rows = 8, 3
    paths = corpus(tmp_path, [world * rows * 10 * seq_len + seq_len]) # a full batch more than the phase can take away
    ranks = [CoprimeSampler(paths, r, world, rows, seq_len, seed=world) for r in range(world)]
    seen = Counter()
    for _ in range(9):
        batches = [next(s) for s in ranks]
        seen.update(int(row[0]) for batch in batches for row in batch)
    cursor = ranks[0].cursors[0]
    assert len(seen) == 9 * world * rows == cursor.used <= cursor.blocks and set(seen.values()) == {1}
    assert {(at - cursor.phase) % seq_len for at in seen} == {0}


def test_same_batches_in_another_process_at_another_place(tmp_path):
    "Order, not only plan: the rows' bytes, hashed in a process with another hash seed."
    code = ("import hashlib, sys; from pathlib import Path; from golfnb.text.loader import CoprimeSampler; from golfnb.studies.packed import PackedSampler\n"
            "def found(folder):\n"
            "    samplers = [order(sorted(Path(folder).glob('*.bin')), 1, 3, 4, 16, 7) for order in (CoprimeSampler, PackedSampler)]\n"
            "    return [hashlib.sha256(b''.join(next(s).tobytes() for _ in range(20))).hexdigest() for s in samplers]\n")
    for folder in (tmp_path / "a", tmp_path / "deep" / "er"):
        folder.mkdir(parents=True)
        corpus(folder, [700, 333, 2000, 15])
    here = {}
    exec(code, here)
    done = subprocess.run([sys.executable, "-c", code + "print(found(sys.argv[1]))", str(tmp_path / "deep" / "er")], capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "2"})
    assert done.stdout.strip() == str(here["found"](tmp_path / "a")), done.stderr


def test_mixture_weights_are_as_specified(tmp_path):
    "Shards drawn with p ~ blocks left ** alpha: first draws of many seeds against the formula, for untouched shards."
    lengths = [16 * n + 1 for n in (1, 4, 16, 64)]
    paths = corpus(tmp_path, lengths)
    counts = Counter(CoprimeSampler(paths, 0, 1, 1, 16, seed).plan()[0][0] for seed in range(3000))
    weight = np.array([1, 4, 16, 64]) ** 0.9
    expected = 3000 * weight / weight.sum()
    assert (np.abs(np.array([counts[s] for s in range(4)]) - expected) < 5 * np.sqrt(expected)).all()


def test_shard_that_changes_while_training_runs(tmp_path):
    "Gone, cut off or replaced: a sentence from the thread that names the shard, never a bus error."
    code = ("import sys; from pathlib import Path; from golfnb.settings import GolfError; from golfnb.text.loader import *; from golfnb.text.shards import write_shard; from golfnb.studies.packed import PackedSampler\n"
            "paths = sorted(Path(sys.argv[1]).glob('*.bin'))\n"
            "for harm in ('gone', 'cut', 'other'):\n"
            "  for order, more in ((SequentialSampler, ()), (CoprimeSampler, (1,)), (PackedSampler, (1,))):\n"
            "    write_shard(paths[0], [7] * 300_000)\n"
            "    with Loader(order(paths, 0, 1, 2, 64, *more), 'cpu', 1024, depth=2) as loader:\n"
            "        for _ in range(5): next(loader)\n"
            "        if harm == 'gone': paths[0].unlink()\n"
            "        elif harm == 'cut': paths[0].open('r+b').truncate(2000)\n"
            "        else: write_shard(paths[0], [7] * 299_999)\n"
            "        try:\n"
            "            for _ in range(10_000): next(loader)\n"
            "        except GolfError as e: print(e)\n")
    corpus(tmp_path, [300_000])
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
    lines = done.stdout.splitlines()
    assert len(lines) == 9 and all("x_train_000000.bin" in line for line in lines), lines
    for words, group in zip(("No such file", "damaged", "300,000 tokens"), (lines[:3], lines[3:6], lines[6:])):
        assert all(words in line for line in group), group
