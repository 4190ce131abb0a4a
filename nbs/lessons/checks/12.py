"""Hidden tests of lesson 12: scoring twice as carefully."""
import random

from golfnb.tools.check import Score


def bug(score):
    """
    1. Write down, for 10 targets, rows of 4 and a stride of 4, which targets each window scores.
    2. The last window is moved back so that it ends with the text, and then scores targets that have a score already.
    3. A window scores what lies behind the end of the window before it, and no more.
    """
    for n, row, stride in ((12, 4, 4), (10, 4, 4), (23, 8, 3), (5, 5, 2), (40, 16, 5)):
        starts = []

        def nats_of(start, n=n, row=row, starts=starts):
            assert 0 <= start <= n - row, f"a window must lie in the text of {n} targets, found one that starts at {start}"
            starts.append(start)
            return [float(2 ** (target % 7) + target) for target in range(start, start + row)]

        found = score(nats_of, n, row, stride)
        want = sum(2 ** (target % 7) + target for target in range(n)) / n
        assert len(starts) == 1 + -(-(n - row) // stride), f"{n} targets in rows of {row} with a stride of {stride} take {1 + -(-(n - row) // stride)} windows, found {len(starts)}"
        assert abs(found - want) < 1e-9, f"with {n} targets, rows of {row} and a stride of {stride} the mean is not that of every target once"


def context(tokens_before):
    """
    1. A window scores its last 64 targets. How much context has the first of them, and how much the last?
    2. The last one has the whole row, the token that it follows included; each one before it has one less.
    3. They grow one by one, so their mean lies halfway between the first and the last.
    """
    want = 2048 - 63 / 2
    assert abs(tokens_before / want - 1) < 0.002, f"{tokens_before} tokens is not it"


def windows(per_rank):
    """
    1. The first window scores a whole row, each other one as many targets as the stride.
    2. How many targets are left after the first row, and how many windows do they take?
    3. Add the first window, and share all of them out among the ranks.
    """
    want = ((62_000_000 - 2048) / 64 + 1) / 8
    assert abs(per_rank / want - 1) < 0.005, f"{per_rank} windows is not it"


def _cost(context):
    return 1 + 7 * 0.95**context


def _text(seed):
    dice, begins = random.Random(seed), [0]
    while begins[-1] < 700:
        begins.append(begins[-1] + dice.choice((20, 60, 200)))
    return begins


def cuts(cut):
    """
    1. Plain windows end anywhere. What does it cost when one begins in the middle of a long document, and what when it begins with one?
    2. A window whose first scored target opens a document needs nothing before it, so it may score a whole row.
    3. Let best[b, w] be the least cost of the first b targets in w windows; try every length of the last window.
    """
    total = targets = 0.0
    for seed in range(4):
        begins = _text(seed)
        n, row, most = begins[-1], 64, begins[-1] // 52
        ends = list(cut(list(begins), row, most))
        assert ends and ends[-1] == n and all(isinstance(e, int) for e in ends), f"the last window must end at {n}"
        assert len(ends) <= most, f"at most {most} windows, found {len(ends)}"
        before, place = 0, 0
        for end in ends:
            assert 0 < end - before <= row, f"a window must score 1 to {row} targets, found {end - before}"
            for target in range(before, end):
                while begins[place + 1] <= target:
                    place += 1
                total += _cost(target - max(begins[place], end - row))
            before = end
        targets += n
    return Score(total / targets, "bits a target", 2.957, 3.284)
