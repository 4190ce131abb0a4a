"""Hidden tests of lesson 14: the whole run."""
import copy
import math
import random

import torch

from golfnb.tools.check import Score


def bug(train):
    """
    1. Look at a checkpoint when it is made, and at the same checkpoint when the training is over.
    2. The checkpoint holds the very tensors that the training goes on to change in place.
    3. What a checkpoint keeps must be a copy, and who goes on from it must not write into it either.
    """
    whole, kept = train(12, 4)
    assert sorted(kept) == [4, 8, 12], f"12 steps with a checkpoint each 4 must give those of 4, 8 and 12, found {sorted(kept)}"
    assert not torch.equal(kept[4]["weights"], kept[8]["weights"]), "the checkpoint of step 4 must hold the weights of step 4, found those of a later step"
    for step in (4, 8):
        before = copy.deepcopy(kept[step]["weights"])
        again, _ = train(12, 4, kept[step])
        assert torch.equal(again, whole), f"a run that goes on from step {step} must end with the weights of one that was never killed"
        assert torch.equal(kept[step]["weights"], before), f"going on from step {step} must leave its checkpoint as it is"


def steps(billion_tokens):
    """
    1. How many steps fit into the time?
    2. Bring both to the same unit of time before you divide.
    3. Each step reads equally many tokens; say the result in billions.
    """
    want = 600 / 0.0834 * 786_432 / 1e9
    assert abs(billion_tokens / want - 1) < 0.01, f"{billion_tokens} billion is not it"


def margin(bits_per_byte):
    """
    1. Lesson 1 turned nats a token into bits per byte.
    2. Nats become bits by a division by the logarithm of two.
    3. A token's bits are then spread over its bytes.
    """
    want = 0.005 / math.log(2) / 2.44
    assert abs(bits_per_byte / want - 1) < 0.02, f"{bits_per_byte} is not it"


def keep(plan):
    """
    1. What does a segment cost that is twice as long: twice as much, or more?
    2. Equal segments are best, for the cost of one bends upwards; the last one needs no writing and may be longer by that much.
    3. So only their number is open: try every number from one to a few hundred.
    """
    dice = random.Random(5)
    total = 0.0
    for _ in range(20):
        write, restart, mean = dice.uniform(0.2, 8), dice.uniform(10, 60), dice.uniform(60, 1500)
        parts = [float(part) for part in plan(600.0, write, restart, mean)]
        assert parts and min(parts) > 0 and abs(sum(parts) - 600) < 1e-6, "the segments must be longer than nothing and sum to 600 s"
        seconds = [part + write for part in parts[:-1]] + parts[-1:]
        total += sum((mean + restart) * math.expm1(s / mean) for s in seconds)
    return Score(total / 20, "s", 757.6, 793.3)
