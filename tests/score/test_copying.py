"""The copy mixture: guesses equal to looking at every earlier place, never ahead, and a distribution with the likeliest shares."""
import random
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from golfnb.score.adapters import document_spans
from golfnb.settings import GolfError
from golfnb.studies.copying import continuations, document_gap, fitted_shares, match_classes, mixed_as_scored, mixed_nats, no_guesses, plain_continuations, records
from golfnb.text.shards import write_shard
from golfnb.tools.results import read_result


def text_of(seed: int) -> tuple[np.ndarray, np.ndarray]:
    "Documents over few tokens, some of them of pieces that come again; lengths from nothing on."
    r = random.Random(seed)
    vocab = r.choice([2, 3, 9, 60])
    tokens = []
    for _ in range(r.randint(1, 6)):
        tokens.append(1)
        pieces = [[r.randint(2, vocab + 1) for _ in range(r.randint(1, 12))] for _ in range(4)]
        for _ in range(r.randint(0, 12)):
            tokens += r.choice(pieces) if r.random() < 0.7 else [r.randint(2, vocab + 1)]
    tokens = np.array([*tokens, 1], np.uint16)
    return tokens, document_spans(torch.from_numpy(tokens.astype(np.int64)), 1)


def equal(a, b, end=None) -> bool:
    return all(np.array_equal(x[:end], y[:end]) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("most", [1, 4, 32])
@pytest.mark.parametrize("seed", range(20))
def test_guesses_are_those_of_looking_at_every_earlier_place(seed, most):
    tokens, spans = text_of(seed)
    assert equal(continuations(tokens, spans, most), plain_continuations(tokens, spans, most))


def classes_of(tokens, found):
    return match_classes(found, found.token == tokens[1:]).values()


@pytest.mark.parametrize("guess", [plain_continuations, continuations])
def test_no_guess_looks_ahead_or_into_another_document(guess):
    tokens, spans = text_of(5)
    found = guess(tokens, spans)
    assert (found.length > 0).any() and len(spans) > 1
    for n in range(1, len(tokens)):
        other = tokens.copy()
        other[n:] = np.random.default_rng(n).integers(2, 9, len(tokens) - n)
        again = guess(other, spans)
        assert equal(again, found, n), f"what comes after token {n} changed a guess before it"
        for one, two in zip(classes_of(other, again), classes_of(tokens, found)):
            assert np.array_equal(one[:n], two[:n]), "or its class"
    for first, end in spans:
        alone = guess(tokens[first:end + 1], np.array([[0, end - first]]))
        assert equal(alone, [column[first:end] for column in found])
        assert (found.distance[first:end] <= np.arange(end - first)).all()


def test_a_phrase_that_goes_on_and_on_is_guessed():
    phrase, times = [5, 6, 7, 8], 30
    tokens = np.array([1, *phrase * times])
    spans = np.array([[0, len(tokens) - 1]])
    found, first = continuations(tokens, spans), len(phrase) + 1  # the first target with something to go by
    assert (found.token[:first] == -1).all() and (found.token[first:] == tokens[first + 1:]).all()
    assert (found.distance[first:] == len(phrase)).all()
    assert found.length[first:].tolist() == [min(32, 1 + i) for i in range(len(tokens) - 1 - first)]
    seen = records(found, found.token == tokens[1:])
    assert (seen[:first + len(phrase)] == 0).all() and (seen[first + len(phrase):] == 2).all()


def test_what_has_no_match_has_no_guess():
    tokens = np.arange(1, 40)
    assert equal(continuations(tokens, np.array([[0, 38]])), no_guesses(38))


def test_the_mixture_sums_to_one():
    "Over a small vocabulary, for shares from nothing to nearly everything, with a guess and without."
    draw = np.random.default_rng(0)
    tokens, spans = text_of(9)
    found, vocab = continuations(tokens, spans), int(tokens.max()) + 1
    nats = -np.log(draw.dirichlet(np.full(vocab, 0.3), len(found.token)))
    assert (found.token == -1).any() and (found.token >= 0).any()
    for classes in classes_of(tokens, found):
        share = np.where(found.token >= 0, draw.random(classes.max() + 1)[classes], 0.0)
        columns = [mixed_nats(nats[:, x], found.token == x, share) for x in range(vocab)]
        np.testing.assert_allclose(np.exp(-np.stack(columns)).sum(0), 1, rtol=1e-12)
        expected = (1 - share) * np.exp(-nats[:, 2]) + share * (found.token == 2)
        np.testing.assert_allclose(np.exp(-columns[2]), expected, rtol=1e-12)


def test_shares_are_the_likeliest():
    "No share on a fine grid does better, with the one wrong guess that each class counts more."
    draw = np.random.default_rng(1)
    classes = draw.integers(0, 5, 4000)
    hit = draw.random(4000) < np.array([0.0, 0.05, 0.4, 0.9, 1.0])[classes]
    nats = draw.exponential(3.0, 4000).astype(np.float32)
    shares = fitted_shares(nats, hit, classes, 7)
    assert shares[[0, 5, 6]].tolist() == [0, 0, 0] and (np.diff(shares[:5]) > 0).all() and shares[4] < 1
    grid = np.linspace(0, 1, 2000, endpoint=False)
    for number, share in enumerate(shares):
        mine = classes == number
        def cost(share, mine=mine):
            return mixed_nats(nats[mine], hit[mine], np.full(mine.sum(), share)).sum() - np.log1p(-share)
        assert cost(share) <= min(map(cost, grid)) + 1e-9


def test_a_guess_that_the_model_knows_better_gets_nothing():
    nats = np.full(1000, 0.1)
    hit = np.arange(1000) % 2 == 0  # the guess is right in half of all, the model knows nine of ten
    assert fitted_shares(nats, hit, np.zeros(1000, int), 1).tolist() == [0.0]


def test_without_guesses_nothing_changes():
    nats = np.random.default_rng(2).exponential(3.0, 50)
    hit, classes = np.zeros(50, bool), np.zeros(50, int)
    shares = fitted_shares(nats, hit, classes, 1)
    assert shares.tolist() == [0.0] and np.array_equal(mixed_nats(nats, hit, shares[classes]), nats)


def test_shares_of_scored_text_know_only_documents_before():
    draw = np.random.default_rng(6)
    spans = np.stack([np.arange(0, 400, 40), np.arange(40, 440, 40)], 1)
    nats, hit, classes = draw.exponential(3.0, 400), draw.random(400) < 0.4, draw.integers(0, 3, 400)
    mixed = mixed_as_scored(nats, hit, classes, spans, 5)
    assert np.array_equal(mixed[:80], nats[:80])
    for begin in range(80, 400, 80):
        shares, part = fitted_shares(nats[:begin], hit[:begin], classes[:begin], 3), slice(begin, begin + 80)
        assert (shares > 0).all() and np.array_equal(mixed[part], mixed_nats(nats[part], hit[part], shares[classes[part]]))
        a, b, c = (np.concatenate([one[:begin], draw.permutation(one[begin:])]) for one in (nats, hit, classes))
        assert np.array_equal(mixed_as_scored(a, b, c, spans, 5)[:begin], mixed[:begin])
    assert np.array_equal(mixed_as_scored(nats, hit, classes, spans[:0].reshape(0, 2), 4), nats), "no document, no part"


def test_classes_part_what_they_name():
    length, distance, hit = np.zeros(3001, int), np.zeros(3001, int), np.zeros(3001, bool)
    length[[100, 400, 401, 911, 3000]] = [1, 5, 5, 5, 32]
    distance[[100, 400, 401, 911, 3000]] = [1, 300, 1, 511, 2048]
    hit[[100, 401]] = True
    ways = match_classes(no_guesses(3001)._replace(length=length, distance=distance), hit)
    assert [classes[0] for classes in ways.values()] == [0] * 4
    of = {by: classes[[100, 400, 401, 911, 3000]].tolist() for by, classes in ways.items()}
    assert of["length"] == [1, 4, 4, 4, 10]
    assert of["length, distance"] == [3, 12, 12, 12, 32]
    assert of["length, record"] == [3, 14, 13, 13, 30]
    assert of["length, distance, record"] == [9, 38, 37, 37, 96]


def test_the_interval_is_over_documents():
    "Documents of one length: mean and Student's interval of their means; of many lengths: the mean of all targets."
    draw = np.random.default_rng(3)
    before, after = draw.random((2, 60))
    mean, half = document_gap(before, after, np.arange(0, 61, 15)[[[0, 1], [1, 2], [2, 3], [3, 4]]])
    of_documents = (after - before).reshape(4, 15).mean(1)
    assert mean == pytest.approx((after - before).mean())
    assert half == pytest.approx(3.182446 * of_documents.std(ddof=1) / 2, rel=1e-5)
    assert document_gap(before, after, np.array([[0, 7], [7, 60]]))[0] == pytest.approx(mean)


def test_the_study_by_hand(tmp_path, monkeypatch):
    "Shards and arrays, float16 and float32; parts of a table add up to the difference of the mean; what is not whole is named."
    study = runpy.run_path(str(Path(__file__).parents[1] / "by_hand" / "copy_study.py"))["main"]
    draw = np.random.default_rng(4)
    texts = {name: np.concatenate([text_of(seed)[0][:-1] for seed in seeds]) for name, seeds in (("train", range(20)), ("val", range(20, 30)))}
    write_shard(tmp_path / "train.bin", texts["train"])
    np.save(tmp_path / "val.npy", texts["val"])
    for name, dtype in (("train", np.float16), ("val", np.float32)):
        np.save(tmp_path / f"{name}_nats.npy", draw.exponential(3.0, len(texts[name]) - 1).astype(dtype))
    np.save(tmp_path / "adapted.npy", 0.9 * np.load(tmp_path / "val_nats.npy"))
    words = ["study", "try", "a note", "--train", "train.bin", "train_nats.npy", "--val", "val.npy", "val_nats.npy", "--adapted", "adapted.npy", "--folder", "."]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", words)
    study()
    found = read_result("try", tmp_path)
    gaps = {(f"{row['scores']}, {row['fitted']}", row["by"]): row["gap"] for row in found["facts"]["gaps"]}
    for scores in ("plain, training", "adapted, training", "plain, scored", "adapted, scored"):
        assert gaps[scores, "length"] < 0
        for rows in found["facts"]["tables"].values():
            assert sum(row["targets"] for row in rows) == pytest.approx(1)
            assert sum(row[scores] for row in rows) == pytest.approx(gaps[scores, "length, distance, record"])
    np.save(tmp_path / "val.npy", texts["val"][:-1])
    with pytest.raises(GolfError, match="val.npy: expected a text .* longer"):
        study()
    np.save(tmp_path / "adapted.npy", np.full(3, np.nan))
    np.save(tmp_path / "val.npy", texts["val"])
    with pytest.raises(GolfError, match="adapted.npy: expected a finite number"):
        study()
    np.save(tmp_path / "adapted.npy", np.ones(3))
    with pytest.raises(GolfError, match="adapted: expected the .* targets of val_nats.npy, found 3"):
        study()
