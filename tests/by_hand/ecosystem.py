"""ParallelMuon under Lightning, accelerate and the Trainer of transformers, on 1 and 2 CPU ranks.

    python tests/by_hand/ecosystem.py          makes an environment beside .venv, for these two packages, and runs every case
    python tests/by_hand/ecosystem.py CASE     one case in this process, or in this rank of torchrun

Every case trains a small model in float64 on the same batches and must end at the weights of a plain loop, to 1e-10. Not part of
`make test`: it downloads.
"""
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from golfnb import ParallelMuon, param_groups  # noqa: E402

PACKAGES = ("accelerate==1.15.0", "lightning==2.6.6")
STEPS, ROWS = 6, 8
SETTINGS = dict(lr=0.02, adam_lr=0.01)


class Rows(Dataset):
    "The same rows at every call; a batch of ROWS is one step of the plain loop."

    def __len__(self) -> int:
        return STEPS * ROWS

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x = (torch.arange(6) * 0.7 + i).sin().double()
        return {"x": x, "labels": x[:3].cos()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 10)) for _ in range(2)]
        self.body = nn.Sequential(nn.Linear(6, 10), *blocks, nn.Linear(10, 3)).double()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.body(x) - labels).square().mean()}


def plain() -> dict[str, Tensor]:
    "A loop over whole batches."
    model = Net()
    optimizer = ParallelMuon(model, mesh=None, **SETTINGS)
    for batch in DataLoader(Rows(), ROWS):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
    return model.state_dict()


def loader(world: int, rank: int) -> DataLoader:
    "This rank's rows: of each batch every `world`-th."
    mine = [i for i in range(STEPS * ROWS) if i % world == rank]
    return DataLoader(torch.utils.data.Subset(Rows(), mine), ROWS // world)


def under_accelerate() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Net()
    several = accelerator.num_processes > 1
    optimizer = ParallelMuon(model, reduce="none" if several else "mean", **SETTINGS)  # its DDP averages
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, plan = accelerator.prepare(model, optimizer, plan)
    for batch in loader(accelerator.num_processes, accelerator.process_index):
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        plan.step()
    accelerator.wait_for_everyone()
    return accelerator.unwrap_model(model)


def under_lightning() -> nn.Module:
    import lightning

    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, i):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            optimizer = ParallelMuon(param_groups(self.net), reduce="none" if world > 1 else "mean", **SETTINGS)
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)]

    module = Module()
    trainer = lightning.Trainer(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False)
    trainer.fit(module, loader(world, rank))
    return module.net


def a_trainer(model: nn.Module, folder: str, **more):
    "A Trainer of the page, which takes the rows in order, with its callback that gathers state for rank 0."
    import transformers

    world = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = transformers.TrainingArguments(output_dir=folder, per_device_train_batch_size=ROWS // world, num_train_epochs=1, use_cpu=True, report_to=[], logging_strategy="no", lr_scheduler_type="constant", max_grad_norm=0.0, remove_unused_columns=False, dataloader_pin_memory=False, disable_tqdm=True, **more)

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(Rows())

    class Consolidate(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            if control.should_save or control.should_evaluate:
                getattr(optimizer, "optimizer", optimizer).consolidate_state_dict()

        on_epoch_end = on_step_end

    kwargs = {"params": param_groups(model), "reduce": "none" if world > 1 else "mean", **SETTINGS}
    return InOrder(model=model, args=arguments, train_dataset=Rows(), optimizer_cls_and_kwargs=(ParallelMuon, kwargs), callbacks=[Consolidate()])


def under_trainer() -> nn.Module:
    model = Net()
    a_trainer(model, "unused", save_strategy="no").train()
    return model


def resumed_by_trainer() -> nn.Module:
    "Saved as Trainer does unless told otherwise, in the middle; another model goes on from there."
    folder = Path(tempfile.gettempdir()) / f"golfnb-trainer-{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}"
    a_trainer(Net(), str(folder), save_steps=STEPS // 2).train()
    model = Net()
    for p in model.parameters():
        p.data.zero_()
    a_trainer(model, str(folder), save_steps=STEPS // 2).train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS // 2}"))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return model


CASES = {"accelerate": under_accelerate, "lightning": under_lightning, "trainer": under_trainer, "trainer resumed": resumed_by_trainer}


def run_case(name: str) -> None:
    "One case in this process; fails if its weights are not those of the plain loop."
    world = os.environ.pop("WORLD_SIZE", None)
    want = plain()
    if world is not None:
        os.environ["WORLD_SIZE"] = world
    found = CASES[name]().state_dict()
    apart = max((found[n] - t).abs().max().item() for n, t in want.items())
    moved = max((t - start).abs().max().item() for t, start in zip(want.values(), Net().state_dict().values(), strict=True))
    print(f"{name}, rank {os.environ.get('RANK', 0)} of {world or 1}: {apart:.1e} from the plain loop, which moved by {moved:.2f}", flush=True)
    assert apart < 1e-10 < moved
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def environment() -> Path:
    "The Python of an environment with the project's packages and these two."
    folder = ROOT / "runs" / "ecosystem"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "project.pth").write_text(str(Path(torch.__file__).resolve().parent.parent) + "\n")
    subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
    return python


def main() -> None:
    python = environment()
    for name in CASES:
        for world in (1, 2):
            command = [python] if world == 1 else [python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
            subprocess.run([*command, __file__, name], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    run_case(sys.argv[1]) if len(sys.argv) > 1 else main()
