"""Hidden tests of lesson 6: why eight GPUs wait."""
import random

import torch

from golfnb.tools.check import Score


def _on_ranks(clip, parts, most):
    "What every rank gets: its all_reduce is first listened to, then answered."
    told = []
    for part in parts:
        clip(part.clone(), most, lambda t: told.append(t.clone()) or t)
    assert len(told) == len(parts), f"each rank must call all_reduce once, found {len(told)} calls of {len(parts)} ranks"
    total = torch.stack(told).sum(0)
    return torch.cat([clip(part.clone(), most, lambda t: total) for part in parts])


def bug(clip):
    """
    1. Give four ranks a part of one gradient each, and compare the norm of what comes out with the limit.
    2. The norm of a whole is not the sum of the norms of its parts. What of the parts does add up?
    3. Squares add up: reduce the sum of squares of each part, and take the root of what everybody gets.
    """
    dice = torch.Generator().manual_seed(6)
    gradient = torch.randn(4096, dtype=torch.float64, generator=dice)
    for world in (1, 2, 8):
        for most in (1.0, 50.0, 1000.0):
            want = gradient * min(1.0, most / gradient.norm())
            found = _on_ranks(clip, gradient.chunk(world), most)
            assert torch.allclose(found, want, rtol=1e-4), (
                f"on {world} ranks a gradient of norm {gradient.norm():.1f}, limited to {most:.0f}, must have norm {want.norm():.1f}, found {found.norm():.1f}")


def floor(compute_ms, travel_ms):
    """
    1. Six FLOPs for each weight and token; 400 TFLOP/s are 400 billion FLOPs in a millisecond.
    2. In a reduce-scatter each rank sends seven eighths of the tensor, and in an all-gather too; a weight has two bytes.
    3. Divide work and bytes by their rates, in the same unit of time; what goes there and comes back is sent twice.
    """
    assert abs(compute_ms / (6 * 26e6 * 98_304 / 400e9) - 1) < 0.02, f"the products do not take {compute_ms} ms"
    assert abs(travel_ms / (2 * 7 / 8 * 52e6 / 250e6) - 1) < 0.02, f"the travel does not take {travel_ms} ms"


def small(times_as_long):
    """
    1. The bytes take the same time in both cases; only the latencies differ.
    2. 250 GB/s are 250,000 bytes in a microsecond.
    3. Write both times as latencies plus the time of the bytes, and divide the longer by the shorter.
    """
    bytes_us = 2.2e6 / 250e3
    want = (150 * 11 + bytes_us) / (11 + bytes_us)
    assert abs(times_as_long / want - 1) < 0.03, f"{times_as_long} times is not it"


def _end(sizes, ready, travel, latency):
    network, first = 0.0, 0
    for size in sizes:
        last = first + size
        network = max(network, ready[last - 1]) + latency + sum(travel[first:last])
        first = last
    return network


def buckets(buckets):
    """
    1. Take three gradients and work out all four ways to group them. When does a cut pay?
    2. Whatever comes later, it is best to have the first j gradients through as early as possible.
    3. For each j keep the earliest end of the first j, from the best place where the last bucket may begin; walk the choices back.
    """
    machine = random.Random(6)
    total = 0.0
    for _ in range(20):
        ready, travel, now = [], [], 0.0
        pace = machine.uniform(5, 40)
        for _ in range(60):
            now += machine.expovariate(1) * pace
            ready.append(now)
            travel.append(machine.choice((1, 1, 2, 8, 24)) * machine.uniform(0.5, 1.5))
        sizes = [int(size) for size in buckets(list(ready), list(travel), 11)]
        assert all(size > 0 for size in sizes) and sum(sizes) == 60, f"the buckets must hold each of the 60 gradients once, found {sum(sizes)}"
        total += _end(sizes, ready, travel, 11)
    return Score(total / 20, "us", 1584.7, 1975)
