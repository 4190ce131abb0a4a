"""Spans: every batch of the published rule, token for token, on 1, 2 and 8 ranks; places that can be kept."""
import json

import numpy as np
import pytest

from golfnb.text.loader import Loader
from golfnb.settings import GolfError
from golfnb.text.shards import find_shards, write_shard
from golfnb.text.spans import SpanSampler


def shards(folder, lengths=(700, 411, 905), seed=0):
    "Shards of random tokens, 1 among them; the second begins within a document."
    draw = np.random.default_rng(seed)
    for number, n in enumerate(lengths):
        tokens = draw.integers(1, 40, n).astype(np.uint16)
        tokens[:5] = (1, 2, 2, 2, 2) if number != 1 else (7, 7, 7, 1, 2)
        write_shard(folder / f"x_train_{number:06d}.bin", tokens)
    paths = find_shards(folder / "x_train_*.bin")
    return paths, [np.fromfile(path, "<u2", offset=1024) for path in paths]


def published(texts, rank, world, tokens_per_step, accum, count):
    "Inputs and targets of one rank as the published loader gives them: one stretch after the other, from each shard's first BOS on."
    local, shard = tokens_per_step // (world * accum), 0
    cursor = int(np.flatnonzero(texts[0] == 1)[0])
    for _ in range(count):
        while cursor + (local + 1) * world > len(texts[shard]):
            shard = (shard + 1) % len(texts)
            cursor = int(np.flatnonzero(texts[shard] == 1)[0])
        own = texts[shard][cursor + rank * (local + 1):][:local + 1]
        cursor += (local + 1) * world
        yield own[:-1], own[1:]


@pytest.mark.parametrize("world", [1, 2, 8])
def test_batches_are_the_published_ones(world, tmp_path):
    paths, texts = shards(tmp_path)
    accum, row = 8 // world, 6
    rows = 192 // (world * accum * row)  # of a step of 192 tokens
    for rank in range(world):
        ours = SpanSampler(paths, rank, world, rows, row, accum)
        for x, y in published(texts, rank, world, 192, accum, 60):  # more than a pass
            batch = next(ours)
            assert np.array_equal(batch[:, :-1].ravel(), x) and np.array_equal(batch[:, 1:].ravel(), y)


def test_a_loader_goes_on_where_a_place_was_kept(tmp_path):
    paths, _ = shards(tmp_path)
    with Loader(SpanSampler(paths, 1, 2, 3, 5, 4), "cpu", 40) as batches:
        for _ in range(7):  # within a step
            next(batches)
        place = json.loads(json.dumps(batches.state()))
        wanted = [next(batches) for _ in range(40)]
    with Loader(SpanSampler(paths, 1, 2, 3, 5, 4), "cpu", 40) as other:
        other.rewind(place)
        for batch in wanted:
            assert all((a == b).all() for a, b in zip(next(other), batch, strict=True))


def test_shards_that_give_no_batch_are_refused(tmp_path):
    paths, _ = shards(tmp_path)
    SpanSampler(paths, 0, 1, 1, 904)
    with pytest.raises(GolfError, match="at most 905.*TRAIN_BATCH_TOKENS"):
        SpanSampler(paths, 0, 1, 1, 905)
    with pytest.raises(GolfError, match="at most 0"):
        SpanSampler(paths, 0, 1, 1, 5, bos=99)
