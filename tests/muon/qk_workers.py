"""What ranks do with QkClip: each sees other logits, and all scale alike."""
import torch
from torch import Tensor, nn

from golfnb.muon.optimizer import ParallelMuon
from golfnb.muon.rules import QkClip


class Attention(nn.Module):
    "Queries of four heads, keys of two; notes the largest logit of each head."

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.q, self.k = nn.Linear(12, 24, bias=False, dtype=dtype), nn.Linear(12, 12, bias=False, dtype=dtype)
        self.largest = torch.zeros(4, dtype=dtype)

    def logits(self, rows: Tensor) -> Tensor:
        q, k = (f(rows).unflatten(-1, (-1, 6)).transpose(0, 1) for f in (self.q, self.k))
        return q @ k.repeat_interleave(2, 0).mT

    def forward(self, rows: Tensor) -> Tensor:
        made = self.logits(rows)
        with torch.no_grad():
            torch.maximum(self.largest, made.amax((1, 2)), out=self.largest)
        return made.square().mean()


def rows_of(rank: int) -> Tensor:
    return 3 * torch.randn(7, 12, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def clipped(ranks, limit: float) -> dict[str, Tensor]:
    "Weights after three steps with the hook; the rate is 0, so that nothing but the hook moves them."
    torch.manual_seed(0)
    model = Attention()
    optimizer = ParallelMuon([{"params": list(model.named_parameters()), "rule": "muon"}], lr=0.0, weight_decay=0.0)
    optimizer.register_step_post_hook(QkClip([(model.q.weight, model.k.weight, model.largest)], limit))
    for step in range(3):
        model(rows_of(ranks.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**{n: p.detach().clone() for n, p in model.named_parameters()}, "largest": model.largest.clone()}
