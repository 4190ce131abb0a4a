"""What the page for PyTorch users says and no other test holds."""
import torch
from torch import nn

from golfnb.muon.optimizer import ParallelMuon
from golfnb.muon.rules import MuonRule


class Counted(MuonRule):
    "Muon that notes the shapes of the stacks that are orthogonalized."

    def __init__(self):
        self.stacks: list[tuple[int, ...]] = []

    def direction(self, stack, state, group, ok):
        self.stacks.append(tuple(stack.shape))
        return super().direction(stack, state, group, ok)


def test_matrices_of_one_shape_are_one_product():
    "Separate parameters of one shape are orthogonalized together, without zero matrices to fill up."
    shapes = [(8, 4), (6, 6), (8, 4), (8, 4), (6, 6)]
    weights, rule = [nn.Parameter(torch.randn(shape)) for shape in shapes], Counted()
    optimizer = ParallelMuon([{"params": weights, "rule": rule}])
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert sorted(rule.stacks) == [(2, 6, 6), (3, 8, 4)]
