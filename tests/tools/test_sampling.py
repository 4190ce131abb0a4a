"""Writing text: the cached forward gives the logits and the tokens of the plain one, for every variant of the model, over the ends of rows."""
import math
import time
from pathlib import Path

import pytest
import torch
from test_model import VARIANTS, filled
from tiny import settings_for

from golfnb.tools.results import record_result
from golfnb.model.layout import mlp_in_one_bank
from golfnb.model.golf import Block, Golf, SigmoidSkips, init_model
from golfnb.model.engine import Ranks
from golfnb.tools.programs import recipe_program
from golfnb.tools.sampling import CachedBlock, CachedReader, draw, generate, next_logits, row_start, stream_tokens
from golfnb.settings import GolfError


@pytest.mark.parametrize("variant, more", [*((v, {}) for v in VARIANTS), ("odd", {"SKIP_GATE": "sigmoid"}), ("even", {"TRAIN_SEQ_LEN": "23"}), ("odd", {"ROPE_TRAIN_LEN": "64"})])
def test_the_cache_changes_no_logit_and_no_token(variant, more):
    model, cfg = filled(variant, **more)
    text, g, read = [7], torch.Generator().manual_seed(1), CachedReader(model)
    for _ in range(60):  # two and a half rows
        want = next_logits(model, text)
        torch.testing.assert_close(read(text), want, rtol=0, atol=1e-9)
        text.append(draw(want, 0.9, 20, g))
    assert generate(model, [7], 60, 0.9, 1, 20) == text
    read = CachedReader(model)
    for n in (5, 9, 9, 3, 24, 25, 61):  # in pieces, again, back, into a new row
        torch.testing.assert_close(read(text[:n]), next_logits(model, text[:n]), rtol=0, atol=1e-9)


def test_a_row_begins_again_with_its_last_half():
    for T in (1, 2, 7, 24):
        starts = [row_start(n, T) for n in range(1, 200)]
        assert starts[:T] == [0] * T and starts == sorted(starts)
        assert all(T // 2 < n - a <= T for n, a in enumerate(starts, 1) if n > T) and len({b - a for a, b in zip(starts, starts[1:])} - {0}) == 1


def test_temperature_and_top_k():
    logits, g = torch.tensor([0.0, 3.0, 1.0, 2.0]), torch.Generator().manual_seed(0)
    drawn = [[draw(logits, t, k, g) for _ in range(2000)] for t, k in ((0, 0), (1.0, 2), (1.0, 0), (1e-30, 0))]
    assert set(drawn[0]) == set(drawn[3]) == {1} and set(drawn[1]) == {1, 3}
    shares = torch.bincount(torch.tensor(drawn[2]), minlength=4) / 2000
    assert (shares - logits.softmax(-1)).abs().max() < 0.03
    with pytest.raises(GolfError, match="finite"):
        draw(torch.tensor([0.0, math.nan]), 1.0, 0, g)


def test_generate():
    model, cfg = filled(dtype=torch.float32)
    out = generate(model, [1, 2, 3], 40, seed=5)
    assert out[:3] == [1, 2, 3] and len(out) == 43 and out == generate(model, [1, 2, 3], 40, seed=5) != generate(model, [1, 2, 3], 40, seed=6)
    with torch.no_grad():
        assert generate(model, out[:24], 1, temperature=0)[-1] == model(torch.tensor([out[:24]]))[0, -1].argmax()
    for bad in ([], [96], [-1]):
        with pytest.raises(GolfError, match="prompt"):
            next(stream_tokens(model, bad))


def rates(cfg, cached: bool, before: int, count: int, rounds: int = 5) -> list[float]:
    "Tokens a second of `rounds` pieces of `count` tokens, the first after `before` others."
    model = recipe_program(cfg.recipe).build(cfg, Ranks()).model
    text, g, found = torch.randint(cfg.vocab_size, (before,)).tolist(), torch.Generator().manual_seed(0), []
    read = CachedReader(model) if cached else lambda ids: next_logits(model, ids)
    read(text[:-1])
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            text.append(draw(read(text), 0.8, 0, g))
        found.append(count / (time.perf_counter() - start))
    return found


def test_a_token_more_is_read_alone(monkeypatch):
    "Also with 200 before it: all that makes writing slow with the length of a text is the attention to what is kept."
    cfg = settings_for("demo")
    model = Golf(cfg, mlp_in_one_bank(cfg, 1), skips=SigmoidSkips())
    init_model(model, cfg, seed=1)
    text, read, seen = torch.randint(cfg.vocab_size, (210,)).tolist(), CachedReader(model), []
    monkeypatch.setattr(CachedBlock, "run", lambda block, x, *more: seen.append(x.shape[1]) or Block.run(block, x, *more))
    for n in range(200, 211):
        read(text[:n])
    assert seen == [200] * cfg.num_layers + [1] * (10 * cfg.num_layers)


if __name__ == "__main__":
    torch.set_num_threads(2)
    samples = {}
    for recipe, count in (("demo", 20), ("pr549", 20)):
        cfg = settings_for(recipe)
        for way in ("plain", "cached"):
            for place, before in (("beginning", 2), ("end", cfg.train_seq_len - 5 * count - 2)):
                slow = way == "plain" and recipe == "pr549"
                samples[f"{recipe}, {way}, {place} of a row"] = rates(cfg, way == "cached", before, 2 if slow else count)
    print(samples)
    print(record_result("sampling_cpu", samples, "tokens a second", "random weights in fp32, one text, temperature 0.8", {}, Path(__file__).parents[2] / "nbs" / "results"))
