"""A finished run becomes a folder that others load, with the scores of its artifact; what is missing or damaged is a sentence."""
import json
import random
import shutil
from contextlib import suppress

import pytest
import torch
from tiny import TINY, golfnb, one_sentence, run_quietly, tiny_data

from golfnb.file.artifact import load_model
from golfnb.score.evaluate import plain_loss
from golfnb.text.bpb import byte_table, load_tokenizer
from golfnb.model.engine import Ranks
from golfnb.recipes import demo, pr2135
from golfnb.settings import GolfError
from golfnb.text.shards import val_tokens
from golfnb.tools import hub
from golfnb.tools.hub import load_folder, make_folder

ORDER = {"RECIPE": "pr2135", "LOOP_START": "0", "LOOP_END": "0", "PARALLEL_START_LAYER": "1", "SMALL_TENSOR": "2000", "GPTQ_CALIB_SAMPLES": "2", "MAX_WALLCLOCK_SECONDS": "0",
         "MODEL_DIM": "48", "ROPE_DIMS": "4"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "A tiny run of demo and one of pr2135, whose blocks run again: name -> (its folder, its data)."
    root, found = tmp_path_factory.mktemp("hub"), {}
    data = tiny_data(root)
    for program, more in ((demo, {}), (pr2135, ORDER)):
        name = program.__name__.split(".")[-1]
        run_quietly(program, {**TINY, **data, **more, "RUN_ID": name, "RUNS_DIR": str(root / "runs"), "ITERATIONS": "2", "TTT_ENABLED": "0"}, b"# the script\n")
        (root / "runs" / name / "train_gpt.py").write_text("# the script\n")
        found[name] = root / "runs" / name, data
    return found


@pytest.mark.parametrize("name", ["demo", "pr2135"])
def test_a_folder_scores_as_its_artifact_to_the_last_bit(made, name, tmp_path):
    run, data = made[name]
    folder = make_folder(run, tmp_path / "hub", data["TOKENIZER_PATH"])
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "config.json", "model.safetensors", "tokenizer.model", "train_gpt.py"]
    tokens = torch.from_numpy(val_tokens(f"{data['DATA_PATH']}/*_val_*.bin", 32, 512).astype("int64"))
    table = byte_table(load_tokenizer(folder / "tokenizer.model"))
    scores = []
    for model, _ in (load_model(run / "artifact.golf")[:2], load_folder(folder)):
        scores.append(plain_loss(model, tokens, table, 32, 4, Ranks()))
    assert scores[0] == scores[1]
    again, config = load_folder(folder)
    assert again.order == load_model(run / "artifact.golf")[0].order and config["recipe"] == name
    card, summary = (folder / "README.md").read_text(), json.loads((run / "summary.json").read_text())
    assert f"{summary['int6_bpb']:.4f}" in card and f"{summary['sliding_bpb']:.4f}" in card and f"recipe `{name}`" in card


def test_what_is_not_a_finished_run_or_not_whole_is_refused(made, tmp_path, monkeypatch):
    run, data = made["demo"]
    for name in ("artifact.golf", "summary.json", "train_gpt.py"):
        half = shutil.copytree(run, tmp_path / f"without-{name}")
        (half / name).unlink()
        with pytest.raises(GolfError, match=f"finished run, found no {name}"):
            make_folder(half, tmp_path / "hub", data["TOKENIZER_PATH"])
    (tmp_path / "other.model").write_bytes(b"x")
    with pytest.raises(GolfError, match="trained with the tokenizer"):
        make_folder(run, tmp_path / "hub", tmp_path / "other.model")
    assert not [p for p in tmp_path.iterdir() if "hub" in p.name]  # nothing half made is left
    folder = make_folder(run, tmp_path / "hub", data["TOKENIZER_PATH"])
    with pytest.raises(GolfError, match="must be free"):
        make_folder(run, folder, data["TOKENIZER_PATH"])
    config = json.loads((folder / "config.json").read_text())
    for name, wrong in (("vocab_size", 10**9), ("model_dim", 2**20), ("num_layers", 5000), ("num_heads", "many")):
        (folder / "config.json").write_text(json.dumps({**config, "settings": {**config["settings"], name: wrong}}))
        with monkeypatch.context() as patched, pytest.raises(GolfError):
            patched.setattr(hub, "model_from_settings", lambda *a, **k: pytest.fail("a model was built"))
            load_folder(folder)
    rng, whole = random.Random(0), json.dumps(config).encode()
    for _ in range(200):
        changed = bytearray(whole)
        changed[rng.randrange(len(changed))] = rng.randrange(256)
        (folder / "config.json").write_bytes(changed)
        with suppress(GolfError):
            load_folder(folder)
    (folder / "config.json").write_bytes(whole)
    (folder / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(GolfError, match="cannot read .*safetensors"):
        load_folder(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(GolfError, match="of a model of golfnb"):
        load_folder(folder)


def test_the_command_makes_it_beside_the_run_and_says_that_nothing_was_sent(made, tmp_path):
    run, data = made["demo"]
    done = golfnb("hub", run, "--tokenizer", data["TOKENIZER_PATH"], cwd=tmp_path)
    assert done.returncode == 0 and "nothing was sent" in done.stdout and (tmp_path / "hub-demo" / "config.json").is_file(), done
    again = golfnb("hub", run, "--tokenizer", data["TOKENIZER_PATH"], cwd=tmp_path)
    assert again.returncode and one_sentence(again.stderr) and "must be free" in again.stderr, again
