"""Downloading: the real hub client against a small hub: a break in the middle, a stop, wrong size, wrong hash, 404."""
import resource
import signal
import sys

import numpy as np
import pytest

pytest.importorskip("huggingface_hub")

from small_hub import SmallHub

from golfnb.tools.cli import main_cli
from golfnb.settings import GolfError
from golfnb.tools.data import download_shards, stdlib_documents, train_tokenizer
from golfnb.text.shards import read_header, shard_header

REPO = "someone/golf-data"
DATA = "datasets/datasets/fineweb10B_sp1024"
TRAIN = [f"{DATA}/fineweb_train_{i:06d}.bin" for i in range(3)]


def shard(tokens, seed):
    return shard_header(tokens) + np.random.default_rng(seed).integers(1, 1000, tokens).astype("<u2").tobytes()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    model = tmp_path_factory.mktemp("m") / "t.model"
    train_tokenizer(stdlib_documents(["argparse", "collections", "logging", "random", "threading", "turtle", "typing", "unittest"]), model, 1024)
    return {"datasets/tokenizers/fineweb_1024_bpe.model": model.read_bytes(), f"{DATA}/fineweb_val_000000.bin": shard(5000, 7),
            f"{DATA}/fineweb_val_000001.bin": shard(300, 8), **{name: shard(400_000, i) for i, name in enumerate(TRAIN)}}


@pytest.fixture
def hub(published, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)  # between attempts
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)  # the client writes whole pieces; its own are 10 MB
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    with SmallHub(REPO, dict(published)) as small:
        yield small


def download(hub, out, train_shards=2):
    return download_shards(out, 1024, train_shards, repo=REPO, endpoint=hub.endpoint)


def gets(hub):
    return [entry for entry in hub.log if entry[0] == "GET" and "/api/" not in entry[1]]


def target(out, name):
    return out / name.removeprefix("datasets/")


def test_everything_lands_where_recipes_look_for_it_and_once(hub, tmp_path, capsys):
    download(hub, tmp_path)
    wanted = [n for n in hub.files if n != TRAIN[2]]
    for name in wanted:
        assert target(tmp_path, name).read_bytes() == hub.files[name]
    assert f"{len(wanted)} files fetched, 0 there already" in capsys.readouterr().out and read_header(target(tmp_path, TRAIN[1])) == 400_000
    assert {p for p in tmp_path.rglob("*") if p.is_file()} == {target(tmp_path, n) for n in wanted}, "nothing but these"
    before = len(gets(hub))
    download(hub, tmp_path)
    assert len(gets(hub)) == before and f"0 files fetched, {len(wanted)} there already" in capsys.readouterr().out
    download(hub, tmp_path, 3)
    assert target(tmp_path, TRAIN[2]).exists() and len(gets(hub)) == before + 1


def test_what_lies_where_a_download_goes_first_stays(hub, tmp_path):
    (tmp_path / ".download/mine").mkdir(parents=True)
    (tmp_path / ".download/mine/notes.txt").write_text("of mine")
    download(hub, tmp_path)
    assert [path.name for path in (tmp_path / ".download").rglob("*")] == ["mine", "notes.txt"] and target(tmp_path, TRAIN[0]).exists()


def test_files_beside_the_shards_are_left_out_and_named(hub, tmp_path, capsys):
    for name in ("fineweb_val_bytes_000000.bin", "fineweb_train_bytes_000000.bin"):
        hub.files[f"{DATA}/{name}"] = shard(300, 9)
    download(hub, tmp_path, 3)
    assert not [*tmp_path.rglob("*bytes*")] and "left out: 2 files" in capsys.readouterr().out


@pytest.mark.parametrize("cuts", [[100_000], [1, 300_000, 50_000]])
def test_a_line_that_breaks_is_taken_up_again_by_itself(hub, tmp_path, cuts):
    hub.cuts[TRAIN[0]] = list(cuts)
    download(hub, tmp_path)
    assert target(tmp_path, TRAIN[0]).read_bytes() == hub.files[TRAIN[0]]
    starts = np.cumsum([0, *(cut // 10_000 * 10_000 for cut in cuts)]).tolist()
    assert [start for start, _ in hub.gets(TRAIN[0])] == starts, "each attempt began where the one before had ended"


def test_a_stopped_download_goes_on_with_the_files_that_miss(hub, tmp_path):
    hub.cuts[TRAIN[0]], hub.down_after[TRAIN[0]] = [250_000], 1
    with pytest.raises(GolfError, match="someone/golf-data ") as caught:
        download(hub, tmp_path)
    assert "\n" not in str(caught.value) and not target(tmp_path, TRAIN[0]).exists()
    hub.down_after.clear()
    download(hub, tmp_path)
    assert target(tmp_path, TRAIN[0]).read_bytes() == hub.files[TRAIN[0]]
    assert len(hub.gets(f"{DATA}/fineweb_val_000000.bin")) == 1, "what was there is not fetched again"


@pytest.mark.parametrize("stated", [801_023, 801_025, 10])
def test_a_wrong_size_is_refused(hub, tmp_path, stated):
    hub.sizes[TRAIN[1]] = stated
    with pytest.raises(GolfError, match="someone/golf-data") as caught:
        download(hub, tmp_path)
    assert "\n" not in str(caught.value) and not target(tmp_path, TRAIN[1]).exists()


def test_a_header_that_promises_another_size_is_refused(hub, tmp_path):
    hub.files[TRAIN[0]] = shard_header(400_001) + hub.files[TRAIN[0]][1024:]
    with pytest.raises(GolfError, match="fineweb_train_000000.*400,001 tokens"):
        download(hub, tmp_path)
    assert not target(tmp_path, TRAIN[0]).exists()
    hub.hashes.clear()
    hub.files[TRAIN[0]] = shard(400_000, 0)
    download(hub, tmp_path)
    assert target(tmp_path, TRAIN[0]).read_bytes() == hub.files[TRAIN[0]], "the damaged one was not kept"


def test_a_wrong_hash_is_refused(hub, tmp_path):
    hub.hashes[TRAIN[0]] = "0" * 64
    with pytest.raises(GolfError, match="SHA-256 000000000000"):
        download(hub, tmp_path)
    assert not target(tmp_path, TRAIN[0]).exists()
    hub.hashes.clear()
    hub.files[TRAIN[0]] = shard(400_000, 0)
    download(hub, tmp_path)
    assert target(tmp_path, TRAIN[0]).read_bytes() == hub.files[TRAIN[0]], "the damaged one was not kept"


def test_what_the_hub_lacks_is_said_in_a_sentence(hub, tmp_path):
    with pytest.raises(GolfError, match="4 train shards.*3"):
        download(hub, tmp_path, 4)
    with pytest.raises(GolfError, match="fineweb_8192_bpe.model"):
        download_shards(tmp_path, 8192, 1, repo=REPO, endpoint=hub.endpoint)
    with pytest.raises(GolfError, match="someone/else"):
        download_shards(tmp_path, 1024, 1, repo="someone/else", endpoint=hub.endpoint)
    for i in range(2):
        del hub.files[f"{DATA}/fineweb_val_{i:06d}.bin"]
    with pytest.raises(GolfError, match="1 val shards.*0"):
        download(hub, tmp_path / "new")


def test_a_foreign_file_under_the_name_is_left_alone(hub, tmp_path):
    path = target(tmp_path, TRAIN[0])
    path.parent.mkdir(parents=True)
    path.write_bytes(b"mine")
    with pytest.raises(GolfError, match=path.name):
        download(hub, tmp_path)
    assert path.read_bytes() == b"mine"


def refused(words, capsys) -> str:
    "What the command says where it refuses: one sentence."
    assert main_cli(words) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("golfnb: "), said
    assert not [line for line in said if "Traceback" in line], said
    return said[-1]


def test_no_hub_a_gated_repository_and_no_client_are_said_in_a_sentence(hub, tmp_path, monkeypatch, capsys):
    words = ["data", "download", "--repo", REPO, "--out", str(tmp_path / "d"), "--train-shards", "1", "--endpoint"]
    assert "HF_ENDPOINT" in refused([*words, "http://127.0.0.1:9"], capsys)
    hub.gated = True
    assert "on request" in refused([*words, hub.endpoint], capsys)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install golfnb[data]" in refused([*words, hub.endpoint], capsys)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_said_and_the_rest_comes_later(hub, tmp_path, capsys):
    words = ["data", "download", "--repo", REPO, "--out", str(tmp_path / "d"), "--train-shards", "1", "--endpoint", hub.endpoint]
    kept, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, limits[1]))
        assert "File too large" in refused(words, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, kept)
    assert main_cli(words) == 0 and target(tmp_path / "d", TRAIN[0]).read_bytes() == hub.files[TRAIN[0]]


def test_the_command(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["data", "download", "--repo", REPO, "--endpoint", hub.endpoint, "--out", "d", "--train-shards"]
    assert main_cli([*words, "1"]) == 0
    assert "TOKENIZER_PATH=d/tokenizers/fineweb_1024_bpe.model" in capsys.readouterr().out and (tmp_path / "d/datasets/fineweb10B_sp1024/fineweb_train_000000.bin").exists()
    assert main_cli([*words, "9"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("golfnb: ") and "found 3" in said
