"""Several nodes: one answer, one folder, and a sentence when one is gone. Nodes are network namespaces on one machine, which needs root.

`python tests/run/test_nodes.py` measures flat against two-level links and writes nbs/results/nodes_cpu.json."""
import contextlib
import itertools
import json
import os
import pickle
import re
import subprocess
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from forked import fork_python
from tiny import TINY, clean_env, tiny_data
from workers import enter_node, on_nodes, settings, spawn

from golfnb.tools.results import record_result
from golfnb.model.engine import Ranks

HERE, TWO = Path(__file__).resolve().parent, {"LINKS": "two_level"}
NETWORKS = itertools.count()
CASES = [settings(4), settings(3, PLAN="shared_mlp"), settings(3, CLIP="local", GRAD_CLIP_NORM="0.05")]


def sh(command: str):
    subprocess.run(command.split(), check=True, capture_output=True)


def can_make() -> bool:
    "Whether this user may make network namespaces with a bridge and a shaped link."
    try:
        with namespaces(1, "50mbit"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@contextlib.contextmanager
def namespaces(n: int, rate: str = ""):
    "Names of `n` nodes of a network of their own, 10.77.0.1 and up, on one switch; `rate`: what each may send, like 50mbit."
    switch, *nodes = names = [f"golf{os.getpid()}-{next(NETWORKS)}{x}" for x in ("s", *range(n))]
    try:
        for name in names:
            sh(f"ip netns add {name}")
            sh(f"ip -n {name} link set lo up")
        sh(f"ip -n {switch} link add br0 type bridge")
        sh(f"ip -n {switch} link set br0 up")
        for i, node in enumerate(nodes):
            sh(f"ip -n {node} link add eth0 type veth peer name v{i} netns {switch}")
            sh(f"ip -n {switch} link set v{i} master br0 up")
            sh(f"ip -n {node} addr add 10.77.0.{i + 1}/24 dev eth0")
            sh(f"ip -n {node} link set eth0 up")
            if rate:
                sh(f"tc -n {node} qdisc add dev eth0 root tbf rate {rate} burst 64kb latency 400ms")
        yield nodes
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


needs_nodes = pytest.mark.skipif(not can_make(), reason="network namespaces need root, ip and tc")


def start(nodes: list, nproc: int, folder: Path, *words: str, **env) -> list:
    "A forked torchrun on every node, which forks ranks of node_worker.py; each node in its own folder node0, node1, ...; what it says is in its file log."
    jobs = []
    for i, node in enumerate(nodes):
        (here := folder / f"node{i}").mkdir(exist_ok=True)
        words_here = ["-m", "torch.distributed.run", f"--nnodes={len(nodes)}", f"--node_rank={i}", f"--nproc_per_node={nproc}",
                      "--master_addr=10.77.0.1", "--master_port=29571", "--start_method=fork", "--run_path", str(HERE / "node_worker.py"), *words]
        with open(here / "log", "w") as log:
            jobs.append(fork_python(words_here, log, log, here, clean_env(**env, GLOO_SOCKET_IFNAME="eth0"), partial(enter_node, node)))
    return jobs


def said(folder: Path) -> str:
    return "\n".join(p.read_text() for p in sorted(folder.glob("node*/log")))


def finish(jobs: list, folder: Path, status: int = 0):
    try:
        for job in jobs:
            job.join(600)
        assert not any(job.is_alive() for job in jobs), said(folder)
        assert all((job.exitcode != 0) == bool(status) for job in jobs), said(folder)
    finally:
        end(jobs)


def end(jobs: list):
    for job in jobs:
        if job.is_alive():
            os.killpg(job.pid, 9)


def results(nodes: list, nproc: int, folder: Path, what: str, envs: list) -> list:
    finish(start(nodes, nproc, folder, what, str(folder), json.dumps(envs)), folder)
    return [pickle.loads((folder / f"{r}.pkl").read_bytes()) for r in range(len(nodes) * nproc)]


def same(a: tuple, b: tuple) -> bool:
    "Weights, replicas and losses of `five_steps`, to 1e-9."
    near = [np.abs(x[k] - y[k]).max() < 1e-9 for x, y in zip(a[:2], b[:2]) for k in y]
    return all(near) and np.allclose(a[2], b[2], atol=1e-9, rtol=0)


@pytest.mark.parametrize("world, nodes", [(2, 2), (4, 2), (6, 2), (6, 3)])
def test_two_levels_are_one_node(world, nodes):
    "Global clipping: the single process's answer. Local: that of flat links, since it depends on the number of ranks. Nodes keep the same bits."
    alone = on_nodes(Ranks(), 1, CASES[:2])
    outs = spawn(world, "all_checks", [("on_nodes", (nodes, [*(c | TWO for c in CASES), CASES[2]]))])
    for ((*globally, local, flat),) in outs:
        assert all(map(same, globally, alone)) and same(local, flat)
    for rank, (out,) in enumerate(outs):
        first = outs[rank % (world // nodes)][0]
        assert all(np.array_equal(out[i][1][k], first[i][1][k]) for i in range(3) for k in out[i][1])


def test_hosts_of_unequal_ranks_are_refused():
    outs = spawn(3, "unequal_nodes", settings(3, **TWO))
    assert all(re.search(r"nodes .*ranks, .*\[1, 2\]", out) for out in outs)


@needs_nodes
@pytest.mark.parametrize("nodes, nproc", [(2, 1), (2, 2), (3, 1)])
def test_torchrun_on_nodes_gives_the_single_process(tmp_path, nodes, nproc):
    alone = on_nodes(Ranks(), 1, CASES[:1])[0]
    with namespaces(nodes) as names:
        for out in results(names, nproc, tmp_path, "steps", [CASES[0], CASES[0] | TWO]):
            assert all(same(x, alone) for x in out)


@needs_nodes
def test_a_run_without_a_shared_disk(tmp_path):
    "Files on rank 0's node only, the answer of one node; a second run into its folder ends with one sentence on both."
    (tmp_path / "data").mkdir()
    env = {**TINY, **tiny_data(tmp_path / "data"), "RUN_ID": "x", "RUNS_DIR": "runs", "WEIGHT_DTYPE": "fp64", "TTT_ENABLED": "0"}
    with namespaces(2) as names:
        finish(start(names[:1], 2, tmp_path, "run", "-", **{**env, "RUN_ID": "one"}), tmp_path)
        finish(start(names, 1, tmp_path, "run", "-", **env), tmp_path)
        runs = [tmp_path / f"node{i}" / "runs" / "x" for i in (0, 1)]
        assert [p.name for p in runs[1].iterdir()] == ["train.node1.log"] and (runs[0] / "artifact.golf").is_file()
        one, two = (json.loads((p / "summary.json").read_text()) for p in (runs[0].with_name("one"), runs[0]))
        for score in ("raw", "ema", "int6", "sliding"):
            assert one[f"{score}_bpb"] == pytest.approx(two[f"{score}_bpb"], abs=1e-9)
        finish(start(names, 1, tmp_path, "run", "-", **env), tmp_path, 1)
    for i in (0, 1):
        assert "golfnb: runs/x " in (tmp_path / f"node{i}" / "log").read_text()


@needs_nodes
@pytest.mark.slow
def test_a_node_that_vanishes_ends_the_others(tmp_path):
    """Its link goes down, without a word; the ranks left name those lost, and the run goes on on rank 0's node alone.

    A slow link makes the steps last: on no machine does the run end before. Two networks at once, of which one loses node 0
    and one node 1: nearly all of the time goes by in waiting for who does not answer.
    """
    folders = [tmp_path / f"lost{gone}" for gone in (0, 1)]
    envs = []
    for folder in folders:
        (folder / "data").mkdir(parents=True)
        envs.append({**TINY, "MODEL_DIM": "160", "RECIPE": "two_level", **tiny_data(folder / "data"), "RUN_ID": "x", "RUNS_DIR": "runs", "ITERATIONS": "30", "TRAIN_LOG_EVERY": "1000", "TTT_ENABLED": "0", "CHECKPOINT_EVERY_S": "0.1"})
    left = [folder / f"node{1 - gone}" / "log" for gone, folder in enumerate(folders)]
    with namespaces(2, "50mbit") as one, namespaces(2, "50mbit") as other:
        networks, linked = (one, other), [0, 1]
        jobs = [start(names, 2, folder, "run", "-", **env) for names, folder, env in zip(networks, folders, envs)]

        def all_cut() -> bool:
            for gone in [gone for gone in linked if any(folders[gone].glob("node0/runs/x/checkpoints/step-*"))]:
                sh(f"ip -n {networks[gone][gone]} link set eth0 down")
                linked.remove(gone)
            return not linked

        try:
            wait(all_cut)
            wait(lambda: re.search("lost rank 0 and its node in", left[0].read_text()))
            wait(lambda: re.search("lost ranks 2, 3 in", left[1].read_text()))
            wait(lambda: jobs[0][1].exitcode is not None and jobs[1][0].exitcode is not None)
        finally:
            end(sum(jobs, []))
        finish(start(other[:1], 2, folders[1], "run", "-", **envs[1], RESUME="1"), folders[1])
        assert re.search(r"resumed:runs/x step:\d+ .*step:30/30", left[1].read_text(), re.S), said(folders[1])


def wait(until):
    "Until it holds; fails after ten minutes."
    end = time.time() + 600
    while not until():
        assert time.time() < end, "it took too long"
        time.sleep(0.2)


BIG = settings(4, MODEL_DIM="128", CLIP="local")


def measured(folder: Path, what: str, rate: str = "") -> list[list[float]]:
    "`seconds`, or `bytes` sent by node 0, of four steps each over flat and two-level links on 2 nodes of 2 ranks, each node sending at `rate`."
    with namespaces(2, rate) as names:
        return results(names, 2, folder, what, [BIG, BIG | TWO])[0]


@needs_nodes
def test_two_levels_send_less_between_nodes(tmp_path):
    flat, two = map(sum, measured(tmp_path, "bytes"))
    assert two < 0.8 * flat


if __name__ == "__main__":
    import tempfile

    samples, rates = {}, ("10mbit", "50mbit", "200mbit", "1gbit")
    for rate in rates:
        with tempfile.TemporaryDirectory() as folder:
            rows = measured(Path(folder), "seconds", rate)
        samples |= {f"{rate} {name}": [1000 * s for s in times] for name, times in zip(("flat", "two_level"), rows)}
    note = "an optimizer step over two nodes (network namespaces) of two ranks each, four after the first; what a node sends is held to the rate"
    print(record_result("nodes_cpu", samples, "ms", note, {"world": 4, "nodes": 2, "settings": BIG}, HERE.parents[1] / "nbs" / "results"))
