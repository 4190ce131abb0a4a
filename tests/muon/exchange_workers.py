"""What ranks do in tests of the exchange: models whose gradients are known on every rank, and a small optimizer made of buckets."""
import math
import warnings
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from golfnb.muon.exchange import Group, ParamMatrix, block_of, find_group, gradient_of, gradients_of, local, make_buckets, matrices_of
from golfnb.muon.newton_schulz import quintic
from golfnb.settings import GolfError

F64 = torch.float64
PARAMS = {  # name -> (shape, group): uneven on most worlds, "two" and "single" with ranks that hold nothing
    "plain": ((9, 4), {}), "two": ((2, 6), {}), "single": ((1, 3), {}), "stack": ((5, 3, 4), {}), "fused": ((12, 5), {"split_sizes": (3, 4, 5)}),
    "fused_stack": ((3, 6, 2), {"split_sizes": (4, 2)}), "filters": ((7, 2, 3, 3), {"flatten": True}), "filters1d": ((6, 5, 3), {"flatten": True}),
    "turned": ((6, 8), {"split_sizes": (3, 5), "transposed": True}), "turned_stack": ((3, 4, 6), {"split_sizes": (2, 4), "transposed": True}),
}
MISSING = ("two", "stack")  # no gradient on odd ranks; "single" has none anywhere


class Several(nn.Module):
    def __init__(self, dtype=F64):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, (shape, _) in PARAMS.items():
            self.register_parameter(name, nn.Parameter(torch.randint(-50, 50, shape, generator=generator).to(dtype)))


def full_gradient(name: str, rank: int, dtype=F64) -> Tensor:
    "Whole numbers, other ones on every rank, so that means of them are exact."
    generator = torch.Generator().manual_seed(100 * rank + list(PARAMS).index(name))
    return torch.randint(-60, 60, PARAMS[name][0], generator=generator).to(dtype)


def has_gradient(name: str, rank: int) -> bool:
    return name != "single" and not (name in MISSING and rank % 2)


def matrices_in(model: nn.Module) -> list[ParamMatrix]:
    return [m for i, (name, p) in enumerate(model.named_parameters()) for m in matrices_of(name, p, PARAMS[name][1], i)]


def slow_matrix(full: Tensor, m: ParamMatrix) -> Tensor:
    "The matrix by its number in the parameter, without rows of rows: slices of the stack, then a split of outputs."
    shape, group = PARAMS[m.name]
    stack = full.reshape(1, shape[0], -1) if group.get("flatten") else full.reshape(-1, *shape[-2:])
    axis = 2 if group.get("transposed") else 1
    sizes = list(group.get("split_sizes") or [stack.shape[axis]])
    found = [part for one in stack for part in one.split(sizes, axis - 1)]
    return found[NUMBERS[m]]


NUMBERS: dict[ParamMatrix, int] = {}  # a matrix -> which of its parameter's


def number_all(matrices: list[ParamMatrix]):
    for m in matrices:
        NUMBERS[m] = sum(o.name == m.name for o in NUMBERS)


class Counting(Group):
    "A group that notes the dtype and elements of all that it sends."
    sent: list = []

    def note(self, t):
        self.sent.append((t.dtype, t.numel()))

    def mean_at_owners(self, flat):
        self.note(flat)
        return super().mean_at_owners(flat)

    def all_rows(self, mine):
        self.note(mine)
        return super().all_rows(mine)

    def swap(self, flat, leaving, arriving):
        self.note(flat)
        return super().swap(flat, leaving, arriving)


def mean_gradient(m: ParamMatrix, world: int, dtype=F64) -> Tensor:
    grads = [full_gradient(m.name, r, dtype) * has_gradient(m.name, r) for r in range(world)]
    return slow_matrix(sum(grads) / world, m)


def replicated(group: Group, average: bool, dtype=None):
    "Gradients to owners and results back, with every gradient known; how many matrices this rank owned."
    model = Several()
    for name, p in model.named_parameters():
        if has_gradient(name, group.rank):
            p.grad = full_gradient(name, group.rank)
    matrices = matrices_in(model)
    NUMBERS.clear()
    number_all(matrices)
    buckets = make_buckets(matrices, group, average, dtype)
    for b in buckets:
        b.begin(gradients_of(b.read))
    owned = 0
    for b in buckets:
        for m, grad in zip(b.mine, b.arrive(), strict=True):
            alone = full_gradient(m.name, group.rank) * has_gradient(m.name, group.rank)
            expected = mean_gradient(m, group.world) if average else slow_matrix(alone, m)
            assert torch.equal(grad, expected), (m.name, grad, expected)
            owned += 1
    for b in buckets:
        b.prepare(lambda run, grads, rows: [g * 2 for g, r, m in zip(grads, rows, run, strict=True) if r.shape == (m.rows, m.cols)])
    for b in buckets:
        b.give_back(numbered(b, matrices, b.whole()))
    check_finish(buckets, matrices, group)
    return owned


def numbered(bucket, matrices, stacks) -> list:
    "Stacks like these in which every element tells which matrix it belongs to, and nearly where."
    return [torch.stack([torch.full_like(t, 7 * matrices.index(m)) + torch.arange(t.numel()).view_as(t) % 3 for m, t in zip(run, stack, strict=True)])
            for run, stack in zip(bucket.runs, stacks, strict=True)]


def check_finish(buckets, matrices, group):
    seen = []
    for b in buckets:
        for m, piece, result in zip(b.everything, b.pieces, b.results()):
            expected = 7 * matrices.index(m) + torch.arange(m.elements).view(m.rows, m.cols) % 3
            assert torch.equal(result.to(F64), expected[piece.rows, piece.cols].to(F64)), m.name
            seen.append(m)
    assert sorted(map(matrices.index, seen)) == list(range(len(matrices))), "every matrix once, on every rank"


def sharded(group: Group, dtype=None):
    "A fully_shard model: pieces to owners, whole there, results home; weights are changed at the right rows."
    torch.manual_seed(0)
    model = Several()
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    fully_shard(model, mesh=init_device_mesh("cpu", (group.world,)))
    matrices = matrices_in(model)
    NUMBERS.clear()
    number_all(matrices)
    empty = 0
    for name, p in model.named_parameters():
        empty += local(p).numel() == 0
        if name != "single":
            p.grad = torch.zeros_like(p)
            local(p.grad).copy_(local(p.detach()))  # the gradient is the weight, which every rank can know whole
    buckets = make_buckets(matrices, group, dtype=dtype)
    for b in buckets:
        b.begin(gradients_of(b.read))
    for b in buckets:
        for m, piece in zip(b.everything, b.arrive(), strict=True):
            expected = slow_matrix(full[m.name] * (m.name != "single"), m)[m.piece.rows, m.piece.cols]
            assert torch.equal(piece, expected), m.name
    for b in buckets:
        b.prepare(lambda run, grads, rows: [g + 1 for g in grads])
    owned = 0
    for b in buckets:
        made = b.whole()
        for m, t in zip(b.mine, [t for stack in made for t in stack], strict=True):
            assert torch.equal(t.to(F64), slow_matrix(full[m.name] * (m.name != "single"), m) + 1), m.name
            owned += 1
        b.give_back(numbered(b, matrices, made))
    seen = 0
    for b in buckets:
        for m, result in zip(b.everything, b.results()):
            block_of(m, m.param.detach()).copy_(result)
            seen += 1
    assert seen == len(matrices)
    for m in matrices:
        expected = 7 * matrices.index(m) + torch.arange(m.elements).view(m.rows, m.cols) % 3
        assert torch.equal(slow_matrix(m.param.full_tensor(), m), expected.to(F64)), m.name
    return owned, empty


def bytes_travelled(group: Group) -> list:
    "What is sent with bf16 between ranks, of whole and of sharded matrices: the dtypes of each collective."
    counting = Counting(group.process_group, group.rank, group.world)
    Counting.sent = []
    replicated(counting, True, torch.bfloat16)
    whole, Counting.sent = Counting.sent, []
    sharded(counting, torch.bfloat16)
    return [{dtype for dtype, _ in whole}, {dtype for dtype, _ in Counting.sent}, sum(n for _, n in Counting.sent)]


def refusals(group: Group) -> list[str]:
    "What is said of meshes and placements that do not fit."
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    line = init_device_mesh("cpu", (group.world,))
    plane = init_device_mesh("cpu", (group.world, 1), mesh_dim_names=("rows", "one"))
    alone = dist.new_group([0])
    outside = alone if group.rank else "none"
    alone = Group() if group.rank else find_group(alone)
    weight = torch.zeros(4, 4)
    few = DeviceMesh("cpu", [[0]], mesh_dim_names=("rows", "one"))
    cases = [lambda: find_group(few), lambda: find_group("gloo")]
    odd = [distribute_tensor(torch.zeros(4, 4, 4), line, [Shard(1)]), DTensor.from_local(weight, line, [Partial()]), DTensor.from_local(weight, plane, [Shard(0), Partial()])]
    for t, ranks in (*((t, group) for t in odd), (distribute_tensor(weight, line, [Shard(0)]), alone)):
        cases.append(partial(make_buckets, [ParamMatrix("odd", nn.Parameter(t), {}, 0, 4, 0, 4, 0, 4)], ranks))
    p = nn.Parameter(distribute_tensor(weight, line, [Shard(0)]))
    p.grad = distribute_tensor(weight, line, [Replicate()])
    cases += [partial(find_group, outside), partial(gradient_of, *matrices_of("odd", p, {}, 0))]
    said = []
    for case in cases:
        try:
            said.append(f"nothing: {case()}")
        except GolfError as error:
            assert isinstance(error, ValueError)
            said.append(str(error))
    assert find_group(line) == find_group(line.get_group()) and find_group(line).world == group.world and find_group(plane["rows"]).world == find_group(plane).world == group.world
    return said


# ---- a small optimizer: momentum, five rounds, a weight step

RATE, DECAY, MU = 0.05, 0.1, 0.95


def small_model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 10)) for _ in range(3)]
    return nn.Sequential(nn.Linear(6, 10), *blocks, nn.Linear(10, 5)).double()


def loss_of(model, step: int, rank: int, world: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(24, 6, generator=generator, dtype=F64), torch.randint(5, (24,), generator=generator)
    return F.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank])


def matrices_named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n.removeprefix("module."), p) for n, p in model.named_parameters() if p.ndim == 2]


def options(name: str) -> dict:
    return {"split_sizes": (3, 4)} if name.endswith("2.1.weight") else {}


class SmallMuon:
    def __init__(self, model, group: Group, average: bool):
        found = [matrices_of(n, p, options(n), i) for i, (n, p) in enumerate(matrices_named(model))]
        self.group, self.momentum = group, {}
        self.buckets = make_buckets([m for matrices in found for m in matrices], group, average)

    def prepare(self, run: list[ParamMatrix], grads: list[Tensor], rows: list[slice]) -> list[Tensor]:
        found = []
        for m, grad in zip(run, grads, strict=True):
            momentum = self.momentum.setdefault(m, torch.zeros_like(grad))
            momentum.mul_(MU).add_(grad)
            found.append(grad + MU * momentum)
        return found

    @torch.no_grad()
    def step(self):
        for b in self.buckets:
            b.begin(gradients_of(b.read))
        for b in self.buckets:
            b.arrive()
        for b in self.buckets:
            b.prepare(self.prepare)
        for b in self.buckets:
            b.give_back([quintic(t) for t in b.whole()])
        for b in self.buckets:
            for m, made in zip(b.everything, b.results()):
                block = block_of(m, m.param.detach())
                block.mul_(1 - RATE * DECAY).add_(made, alpha=-RATE * math.sqrt(max(1, m.rows / m.cols)))


def trained(group: Group, how: str, steps: int = 4) -> dict[str, Tensor]:
    model = small_model()
    if how == "sharded":
        mesh = init_device_mesh("cpu", (group.world,))
        for block in list(model)[1:-1]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    wrapped = nn.parallel.DistributedDataParallel(model) if how == "ddp" else model
    optimizer = SmallMuon(wrapped, group, average=how == "replicated")
    for step in range(steps):
        wrapped.zero_grad()
        loss_of(wrapped, step, group.rank, group.world).backward()
        optimizer.step()
    return {n: p.full_tensor() if how == "sharded" else p.detach() for n, p in matrices_named(model)}


def trained_plainly(steps: int = 4) -> dict[str, Tensor]:
    "One process and a loop, without a bucket."
    model = small_model()
    named = [(p, part) for n, p in matrices_named(model) for part in torch.arange(len(p)).split(list(options(n).get("split_sizes", [len(p)])))]
    momenta = [torch.zeros(len(rows), p.shape[1], dtype=F64) for p, rows in named]
    for step in range(steps):
        model.zero_grad()
        loss_of(model, step, 0, 1).backward()
        with torch.no_grad():
            for (p, rows), momentum in zip(named, momenta, strict=True):
                grad = p.grad[rows]
                momentum.mul_(MU).add_(grad)
                scale = math.sqrt(max(1, len(rows) / p.shape[1]))
                p[rows] = p[rows] * (1 - RATE * DECAY) - RATE * scale * quintic(grad + MU * momentum)
    return {n: p.detach() for n, p in matrices_named(model)}


def everything(ranks) -> dict:
    "All checks on this number of ranks; what the parent compares over ranks."
    warnings.simplefilter("error", FutureWarning)  # torch's words about its collectives
    warnings.simplefilter("error", DeprecationWarning)
    group = find_group()
    assert (group.rank, group.world) == (ranks.rank, ranks.world)
    found: dict = {"owned": [replicated(group, True), replicated(group, False)], "replicated": trained(group, "replicated")}
    if group.world > 1:
        found["owned_sharded"], found["empty"] = sharded(group)
        found["travelled"] = bytes_travelled(group)
        found["refused"] = refusals(group)
        found |= {how: trained(group, how) for how in ("ddp", "sharded")}
    return found
