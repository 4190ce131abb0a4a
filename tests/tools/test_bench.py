"""`golfnb bench`: every measurement runs on CPU in tiny settings and leaves a complete result; bad input gets one sentence; a run becomes a result."""
import io
import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tiny import TINY, golfnb, one_sentence, without_torchrun

from golfnb.studies import bench
from golfnb.studies.bench import BENCHES, BenchJob, answer_with_ms, bench_eval, bench_function, bench_shards, bench_threads, changed_settings, measure_part, median_bound, record_run, result_path, run_bench, run_rounds, timed_block
from golfnb.tools.results import read_result, settings_diff
from golfnb.settings import GolfError
from golfnb.studies.variants import read_variant
from golfnb.model.engine import Ranks
from golfnb.recipes import golf
from golfnb.text.shards import write_shard

ROOT = Path(__file__).resolve().parents[2]
SMALL = {**TINY, "MODEL_DIM": "64", "TRAIN_SEQ_LEN": "32", "EVAL_SEQ_LEN": "32", "EVAL_STRIDE": "16", "TTT_CHUNK_TOKENS": "128", "VAL_BATCH_SIZE": "4096", "TTT_LORA_RANK": "2", "TTT_BATCH_SIZE": "2"}
WORDS = [f"{k}={v}" for k, v in SMALL.items()]
WHERE = {"name", "unit", "note", "date", "commit", "machine", "versions", "facts", "samples"}


def complete(path: Path) -> dict:
    "A result file with everything a figure needs; every sample finite."
    found = read_result(path.stem, path.parent)
    assert WHERE <= found.keys() and found["versions"]["torch"] and found["machine"]["cores"] >= 1 and len(found["date"]) == 10
    assert found["samples"] and all(math.isfinite(x) for v in found["samples"].values() for x in v)
    return found


def test_ways_to_wait_are_measured_in_turns_idle_and_busy(monkeypatch):
    monkeypatch.setattr(bench, "ANSWER", "import os, sys\nfor _ in sys.stdin: print(2 if 'OMP_WAIT_POLICY' in os.environ else 4, flush=True)")
    env = {**os.environ, "OMP_WAIT_POLICY": "ACTIVE"}
    samples, unit, facts = bench_threads(BenchJob("threads", rounds=5), Ranks(), env)
    ways = [f"{load} {way}" for load in ("idle", "busy") for way in ("spinning", "passive", "one thread", "chosen")]
    assert samples == {way: [2.0 if "passive" in way else 4.0] * 5 for way in ways} and unit == "ms", "only the choice says how to wait"
    assert all(facts[f"{way} / spinning"] == {"median": samples[way][0] / 4, "below": samples[way][0] / 4} for way in ways)
    monkeypatch.setattr(bench, "ANSWER", "raise SystemExit(1)")
    with pytest.raises(GolfError, match="threads.*ended"):
        bench_threads(BenchJob("threads", rounds=5), Ranks(), env)


def test_a_micro_batch_is_timed_for_each_line(monkeypatch, capsys):
    for name, value in SMALL.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n"))
    answer_with_ms()
    assert len([ms for ms in capsys.readouterr().out.split() if float(ms) > 0]) == 2


def test_the_bound_of_a_median_is_an_order_statistic():
    assert median_bound([float(i) for i in range(20, 0, -1)]) == 15.0, "at most 14 of 20 are below the median, in 98 of 100 cases"
    with pytest.raises(GolfError, match="5 .*4"):
        median_bound([1.0] * 4)


def test_phases_of_two_variants_on_two_ranks(tmp_path):
    done = without_torchrun("bench", "phases", "--nproc", 2, "--steps", 4, "--warmup", 1, "--against", "CLIP=local,SEED=3", "-o", "mine.json", *WORDS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = complete(tmp_path / "mine.json")
    samples, facts, names = found["samples"], found["facts"], ("forward_backward", "post_backward", "ema")
    assert {k: len(v) for k, v in samples.items()} == {f"{label} {n}": 4 for label in ("base", "CLIP=local,SEED=3") for n in names}
    assert facts["world"] == 2 and facts["data"] == "random tokens" and facts["settings"]["model_dim"] == 64
    assert "base ema" in done.stdout and "mine.json: written" in done.stdout and "wait around each" in found["note"] and "Traceback" not in done.stderr


def test_links_and_then_plans_on_two_ranks(tmp_path):
    "What one command measures the other predicts with; without it, it says so."
    done = golfnb("bench", "links", "--nproc", 2, "--rounds", 3, *WORDS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    facts = complete(tmp_path / "nbs" / "results" / "links_cpu_2.json")["facts"]
    assert set(facts["links"]["collectives"]) == {"scatter", "gather", "all-reduce"} and "predicted" in done.stdout
    done = without_torchrun("bench", "optimizer", "--nproc", 2, "--rounds", 3, "--only", "plans", *WORDS, cwd=tmp_path)
    assert done.returncode == 0 and "links: nbs/results/links_cpu_2.json" in done.stdout, done.stderr[-2000:]
    found = complete(tmp_path / "nbs" / "results" / "optimizer_cpu_2.json")
    plans = found["facts"]["plans"]
    assert {"pr399", "shared_mlp", "pr125", "searched"} <= set(plans) and plans["searched"]["plan"] == facts["predicted_best"][0][1]
    assert all(len(found["samples"][f"{p} {s}"]) == 15 for p in plans for s in ("tail", "device")) and plans["pr399"]["predicted_device_ms"] > 0


def test_startup_cold_and_warm(tmp_path, monkeypatch):
    "Each sample in processes of its own, which are this one here; cold has fresh compiler caches, warm the same again."
    caches = []

    def here(words, nproc, settings):
        job = BenchJob(**json.loads(words[1]))
        caches.append(Path(settings["TRITON_CACHE_DIR"]))
        assert caches[-1].exists() == (len(caches) % 2 == 0) and job.started > 0
        caches[-1].mkdir(parents=True, exist_ok=True)
        measure_part(replace(job, imported=job.started), Ranks(), {**SMALL, **settings})
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("golfnb.studies.bench.launch_module", here)
    assert run_bench(BenchJob("startup", rounds=2), 1, SMALL) == 0
    samples = complete(tmp_path / "nbs" / "results" / "startup_cpu_1.json")["samples"]
    for kind in ("cold", "warm"):
        for i in range(2):
            marks = [samples[f"{kind} {m}"][i] for m in ("imported", "joined", "data_open", "built", "warmed_up", "first_step_done")]
            assert marks == sorted(marks)
    assert len(set(caches)) == 2 and not any(c.exists() for c in caches) and not list(tmp_path.glob("runs*"))


def test_eval_gives_rates_and_fixed_costs(tmp_path):
    samples, unit, facts = bench_eval(BenchJob("eval", tokens=300, rounds=3, scratch=str(tmp_path)), Ranks(), {**SMALL, "DATA_PATH": "absent"})
    assert unit == "s" and facts["tokens"] == 288 and facts["data"] == "random tokens"  # whole rows of 32
    for name in ("plain", "sliding", "ttt"):
        assert len(samples[f"{name} per_million"]) == 3 and min(samples[f"{name} per_million"]) > 0 and len(samples[f"{name} first_call"]) == 1


def test_the_corpus_is_used_where_there_is_one(tmp_path):
    import numpy as np

    write_shard(tmp_path / "fineweb_train_000000.bin", np.arange(400, dtype=np.uint16))
    settings = read_variant({**SMALL, "DATA_PATH": str(tmp_path)}).settings
    paths, words = bench_shards(settings, Ranks(), tmp_path / "none")
    assert [p.name for p in paths] == ["fineweb_train_000000.bin"] and words == f"shards of {tmp_path.name}"


def test_an_error_in_a_rank_is_one_sentence(tmp_path):
    import numpy as np

    write_shard(tmp_path / "fineweb_train_000000.bin", np.full(9000, 399, dtype=np.uint16))
    done = golfnb("bench", "step", "--nproc", 2, "--steps", 3, *WORDS, "VOCAB_SIZE=300", f"DATA_PATH={tmp_path}", cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr) and "VOCAB_SIZE=300" in done.stderr and "399" in done.stderr
    assert not (tmp_path / "nbs").exists()


@pytest.mark.parametrize("job, settings, said", [
    (BenchJob("step"), {"DATA_PATH": "absent"}, "absent"),
    (BenchJob("step", against=[{"NUM_HEADS": "7"}]), {}, "NUM_HEADS"),
    (BenchJob("eval"), {"EVAL_STRIDE": "64"}, "EVAL_STRIDE"),
    (BenchJob("startup"), {"RECIPE": "none"}, "RECIPE.*'none'"),
    (BenchJob("step", against=[{"CLIP": "loud"}]), {}, "CLIP.*local, global.*'loud'"),
    (BenchJob("step", against=[{"CODEC": "zlib"}]), {}, "CODEC.*best.*demo"),
    (BenchJob("optimizer", links="absent.json"), {}, "absent.json"),
])
def test_bad_jobs_are_refused_before_anything_starts(job, settings, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GolfError, match=said):
        run_bench(job, 2, {**SMALL, **settings})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("argv", [["bench"], ["bench", "walk"], ["bench", "step", "--steps", "2"], ["bench", "step", "--against", "CLIPS=local"], ["bench", "eval", "--against", "CLIP=local"],
                                  ["bench", "scaling", "--steps", "9"], ["bench", "links", "--tokens", "5"]])
def test_bad_command_lines(argv, tmp_path):
    done = golfnb(*argv, cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr)


def test_names_blocks_and_settings():
    assert str(result_path("phases", "NVIDIA H200", 8)) == "nbs/results/phases_h200_8.json"
    calls = []
    each, whole = timed_block(lambda: calls.append(1), 7)
    assert len(each) == len(calls) == 7 and whole >= 0
    run_rounds({"a": "a", "b": "b"}, 3, lambda name: calls.append(name) or {})
    assert calls[7:] == list("abbaab")
    assert all(bench_function(what).__doc__ for what in BENCHES)
    assert changed_settings(read_variant({"SEED": "7", "DATA_PATH": "x"})) == {"recipe": "pr549", "seed": 7}
    assert changed_settings(read_variant({"RECIPE": "golf", "CLIP": "local", "NS": "ns5"})) == {"recipe": "golf", "clip": "local"}


WORDS_OF_GOLF = {"loader": "coprime", "codec": "best", "plan": "shared_mlp", "skip_gate": "sigmoid", "ns": "ns5", "clip": "global", "links": "flat", "averaging": "ema", "qat_banks": True, "scale_floor": False,
                 "use_gptq": False, "ttt_form": "chunks", "ttt_freeze_blocks": 0, "ttt_freeze_scope": "all"}  # as runs of earlier versions kept them


def test_a_run_of_an_earlier_version_differs_only_where_its_words_do():
    own = asdict(golf.Settings(**golf.OWN))
    earlier = own | WORDS_OF_GOLF | {"ttt_lora_rank": 96, "gptq_calib_samples": 64, "checkpoint_every_s": 60.0}
    assert settings_diff(earlier) == settings_diff(own) == settings_diff(earlier, own) == settings_diff(own, earlier) == {}
    changed = earlier | {"clip": "local", "qat_banks": False, "ttt_freeze_blocks": 2, "gptq_calib_samples": 8, "seed": 1_234_567}
    assert settings_diff(changed) == {"clip": ("local", "global"), "qat_banks": (False, "1"), "ttt_freeze_blocks": (2, "0"), "gptq_calib_samples": (8, 64), "seed": (1_234_567, 1337)}
    assert settings_diff(changed | {"seed": 1_234_568}, changed) == {"seed": (1_234_568, 1_234_567)}, "every digit counts"
    assert settings_diff({"recipe": "mine", "model_dim": 64, "clip": "local"}) == {"model_dim": (64, 512)}
    assert settings_diff(earlier, {}).keys() >= {"recipe", "model_dim"}, "a run that says nothing is like no other"


def made_run(folder: Path, seed: int = 1337) -> Path:
    "The files of a finished run of 500 steps, invented."
    folder.mkdir()
    events = [{"event": "step", "step": s, "loss": 3.0, "own_loss": 3.0, "ms": 10.0} for s in range(1, 501)]
    events += [{"event": "val", "step": s, "loss": 2.5, "bpb": 1.4} for s in range(0, 501, 100)] + [{"event": "score", "label": "legal_ttt", "ms": 5.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    said = {"seed": seed, "world": 8, "recipe": "pr549", "steps": 500, "device": "NVIDIA H200", "config": {"recipe": "pr549", "iterations": 500, "data_path": "/secret"},
            "total_bytes": 9_000_000, **{f"{k}_loss": 2.0 for k in ("raw", "ema", "int6", "sliding", "ttt")}}
    (folder / "summary.json").write_text(json.dumps(said))
    (folder / "train.log").write_text("golfnb recipe:pr549 seed:1 device:NVIDIA H200 torch:2.11.0+cu130\n")
    return folder


def test_a_run_becomes_a_result(tmp_path):
    path = record_run(made_run(tmp_path / "run"), into=tmp_path)
    found = read_result("parity_8gpu_seed1337", tmp_path)
    assert path.name == "parity_8gpu_seed1337.json" and WHERE <= found.keys() and "secret" not in path.read_text()
    assert found["versions"]["torch"] == "2.11.0+cu130" and len(found["machine"]["gpus"]) == 8 and found["facts"]["settings"] == {"iterations": 500}
    run = found["samples"]
    assert run["step"][:11] == [*range(1, 11), 20] and len(run["step_ms"]) == 500 and run["val_step"] == [0, 100, 200, 300, 400, 500]
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(GolfError, match="summary.json"):
        record_run(tmp_path / "run", into=tmp_path)


@pytest.mark.parametrize("path", sorted((ROOT / "nbs" / "results").glob("*.json")), ids=lambda p: p.stem)
def test_every_committed_result_says_where_it_comes_from(path):
    found = read_result(path.stem, path.parent)
    assert WHERE <= found.keys() and found["name"] == path.stem and found["date"] and found["machine"] and found["versions"]["torch"]
