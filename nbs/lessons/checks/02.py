"""Hidden tests of lesson 2: documents become batches."""
import random

from golfnb.tools.check import Score


class _Counting:
    "A sampler whose batches are 0, 1, 2 and so on."

    def __init__(self):
        self.at = 0

    def __next__(self):
        self.at += 1
        return self.at - 1

    def state(self):
        return {"at": self.at}

    def load_state(self, state):
        self.at = state["at"]


def bug(Ahead):
    """
    1. Take three batches, ask for the state, and go on from it with a new sampler. Which batch comes first?
    2. The sampler is ahead of the reader: what it says of itself is where it will read next, not what was handed out.
    3. Keep the sampler's state beside each batch that is built, and hand both on together; state() is the one of the last batch handed out.
    """
    for taken in (0, 1, 3, 7):
        sampler = _Counting()
        ahead = Ahead(sampler, depth=2)
        given = [next(ahead) for _ in range(taken)]
        assert given == list(range(taken)), f"batches must come in their order, found {given}"
        assert not taken or sampler.at == taken + 2, f"two batches must be built ahead, found {sampler.at - taken}"
        again = _Counting()
        again.load_state(ahead.state())
        found = next(Ahead(again, depth=2))
        assert found == taken, f"after {taken} batches a new run must go on with number {taken}, found number {found}"
        assert next(ahead) == taken, "asking for the state must not change what comes next"


def read(megabytes_a_second, per_cent_seen):
    """
    1. A token has two bytes, and a rank reads an eighth of the step's tokens.
    2. Divide the bytes of one rank's share of a step by the seconds of a step.
    3. For the second: how many tokens has the run read when it ends, and which part of the data is that?
    """
    want = 786_432 / 8 * 2 / 0.082 / 1e6
    assert abs(megabytes_a_second / want - 1) < 0.02, f"{megabytes_a_second} MB/s is not it"
    assert abs(per_cent_seen / (100 * 786_432 * 7300 / 8e9) - 1) < 0.02, f"{per_cent_seen} % is not it"


def pairs(per_cent_left):
    """
    1. A document of n tokens has 1 + 2 + ... + n pairs.
    2. That sum is n (n + 1) / 2. How many such sums are there, and how long is each?
    3. Add up the pairs of the documents, and divide them by those of a row that is one document.
    """
    want = 100 * 4 * (512 * 513) / (2048 * 2049)
    assert abs(per_cent_left / want - 1) < 0.01, f"{per_cent_left} % is not it"


def pack(pack):
    """
    1. A row is closed as soon as one document does not fit. Which later one would have fitted?
    2. Small documents fill gaps, long ones make them. In which order should they come?
    3. Longest first, each into the row where the least room is left behind it. Then try to do better than that.
    """
    dice = random.Random(2)
    lengths = [min(2048, int(dice.uniform(350, 1000) * dice.choice((1, 1, 1.6)))) for _ in range(400)]
    rows = [list(row) for row in pack(list(lengths))]
    assert sorted(i for row in rows for i in row) == list(range(400)), "each of the 400 documents must lie in one row"
    fullest = max(sum(lengths[i] for i in row) for row in rows)
    assert fullest <= 2048, f"a row has 2048 places, found one with {fullest} tokens"
    return Score(100 * (1 - sum(lengths) / (2048 * len(rows))), "%", 2.870, 23.78)
