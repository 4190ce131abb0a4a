"""Shards: round trip, every kind of damage in a sentence, nothing half written."""
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from golfnb.settings import GolfError
from golfnb.text.shards import (HEADER_BYTES, SHARD_MAGIC, ShardWriter, _checked_header, atomic_write, check_disjoint, find_shards, left_out, open_shard, read_header,
                           read_tokens, shard_name, val_tokens, write_shard)


@given(tokens=st.lists(st.integers(0, 65_535), min_size=1, max_size=300))
@settings(max_examples=40, deadline=None)
def test_round_trip(tmp_path_factory, tokens):
    path = tmp_path_factory.mktemp("s") / "a.bin"
    write_shard(path, tokens)
    assert read_header(path) == len(tokens) and open_shard(path).tolist() == tokens == read_tokens(path).tolist()
    assert path.stat().st_size == 1024 + 2 * len(tokens)
    raw = np.fromfile(path, "<i4", 256)
    assert raw[:3].tolist() == [20240520, 1, len(tokens)] and not raw[3:].any()


@pytest.mark.parametrize("tokens", [[], [-1], [65_536], [1.5], [[1, 2]], ["a"]])
def test_tokens_that_do_not_fit_are_refused(tmp_path, tokens):
    with pytest.raises(GolfError, match="tokens.*a.bin"):
        write_shard(tmp_path / "a.bin", tokens)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tokens", [[1, 70_000], [-1, 3], [1.5, 2.5], np.ones((2, 3), int)])
def test_a_writer_refuses_them_too(tmp_path, tokens):
    with pytest.raises(GolfError, match="whole numbers in 0..65535.*a.bin"), ShardWriter(tmp_path / "a.bin") as shard:
        shard.write([1, 2])
        shard.write(tokens)
    assert not list(tmp_path.iterdir())


def header(magic=SHARD_MAGIC, version=1, tokens=4):
    words = np.zeros(256, "<i4")
    words[:3] = magic, version, tokens
    return words.tobytes()


@pytest.mark.parametrize("data, words", [
    (b"", " 0 bytes"), (b"x" * 100, " 100 bytes"), (header(tokens=0), "token"), (b"P" * 2000, "magic"),
    (header(magic=20240519) + bytes(8), "magic"), (header(version=2) + bytes(8), "version 1, .*2"),
    (header() + bytes(6), "1,032 .* 4 tokens, .*1,030"), (header() + bytes(10), "1,034"), (header() + bytes(9), "1,033"),
    (header(tokens=-4) + bytes(8), "damaged"), (header(tokens=0) + bytes(8), "damaged"), (header(tokens=2**31 - 1) + bytes(8), "damaged"),
])
def test_damage_is_one_sentence(tmp_path, data, words):
    path = tmp_path / "bad.bin"
    path.write_bytes(data)
    for read in (read_header, open_shard, read_tokens):
        with pytest.raises(GolfError, match=words) as caught:
            read(path)
        assert "bad.bin" in str(caught.value) and "\n" not in str(caught.value)


def test_paths_that_are_no_shard(tmp_path):
    for path in (tmp_path / "none.bin", tmp_path):
        with pytest.raises(GolfError):
            read_header(path)
    with pytest.raises(GolfError, match=r"fineweb_train_\*.bin"):
        find_shards(tmp_path / "fineweb_train_*.bin")
    with pytest.raises(GolfError, match=f"{tmp_path}"):
        find_shards(tmp_path)


def test_headers_are_read_once_and_again_after_a_change(tmp_path):
    path = tmp_path / "a.bin"
    write_shard(path, [1, 2, 3])
    _checked_header.cache_clear()
    for _ in range(5):
        assert read_header(path) == 3
    assert _checked_header.cache_info().misses == 1
    write_shard(path, [1, 2, 3, 4])
    assert read_header(path) == 4
    path.write_bytes(b"")
    with pytest.raises(GolfError):
        read_header(path)


def test_patterns_sort_and_join(tmp_path):
    for i in (2, 0, 10, 1):
        write_shard(tmp_path / f"fineweb_val_{i:06d}.bin", [i, i])
    write_shard(tmp_path / "odd[1].bin", [7])
    pattern = tmp_path / "fineweb_val_*.bin"
    assert [p.name[12:18] for p in find_shards(pattern)] == ["000000", "000001", "000002", "000010"]
    assert read_tokens(pattern).tolist() == [0, 0, 1, 1, 2, 2, 10, 10] and read_tokens(pattern).dtype == np.uint16
    assert read_tokens(tmp_path / "odd[1].bin").tolist() == [7], "a name that looks like a pattern is still a name"


def test_only_names_of_shards_of_its_side_answer_a_pattern(tmp_path):
    names = ["a_val_000000.bin", "a_val_bytes_000000.bin", "a_train_bytes_000000.bin", "my_val_set_train_000000.bin", "a_val_x.bin", "a_val_000001.bin.bak"]
    for i, name in enumerate(names):
        write_shard(tmp_path / name, [i, i])
    val, train, both = (tmp_path / pattern for pattern in ("*_val_*.bin", "*_train_*.bin", "*.bin"))
    assert [p.name for p in find_shards(val)] == names[:1] and [p.name for p in find_shards(train)] == ["my_val_set_train_000000.bin"] and len(find_shards(both)) == 2
    assert shard_name(tmp_path / "my_val_set_train_000000.bin") == ("my_val_set", "train") and read_tokens(val).tolist() == [0, 0]
    assert "a_val_bytes_000000.bin" in left_out(val) and left_out(tmp_path / "a_val_0*.bin") == "", "what is left out is named"
    assert read_tokens(tmp_path / names[1]).tolist() == [1, 1], "a file that is named whole is what its name says"
    with pytest.raises(GolfError, match="a_train_bytes_000000.bin"):
        find_shards(tmp_path / "a_train_*.bin")


def test_token_outside_the_vocabulary(tmp_path):
    write_shard(tmp_path / "a.bin", [1, 1023, 1024, 5])
    assert read_tokens(tmp_path / "a.bin", vocab_size=1025).size == 4
    with pytest.raises(GolfError, match="a.bin .*1024, found 1024: "):
        read_tokens(tmp_path / "a.bin", vocab_size=1024)


@pytest.mark.parametrize("n, kept", [(9, 9), (10, 9), (16, 9), (17, 17)])
def test_validation_is_cut_to_whole_rows(tmp_path, n, kept):
    write_shard(tmp_path / "v.bin", list(range(n)))
    assert val_tokens(tmp_path / "v.bin", 8, 100).tolist() == list(range(kept))


def test_validation_shorter_than_a_window(tmp_path):
    write_shard(tmp_path / "v.bin", list(range(8)))
    with pytest.raises(GolfError, match="8 tokens.*v.bin"):
        val_tokens(tmp_path / "v.bin", 8, 100)


def test_train_and_validation_must_not_meet(tmp_path):
    write_shard(tmp_path / "t.bin", [1, 2, 3])
    write_shard(tmp_path / "v.bin", [1, 2, 4])
    (tmp_path / "copy.bin").write_bytes((tmp_path / "t.bin").read_bytes())
    (tmp_path / "link.bin").symlink_to(tmp_path / "t.bin")
    check_disjoint([tmp_path / "t.bin"], [tmp_path / "v.bin"])
    for other in ("t.bin", "copy.bin", "link.bin"):
        with pytest.raises(GolfError, match=f"t.bin .*{other}"):
            check_disjoint([tmp_path / "t.bin"], [tmp_path / "v.bin", tmp_path / other])
    with pytest.raises(GolfError, match="gone.bin"):
        check_disjoint([tmp_path / "gone.bin"], [tmp_path / "v.bin"])


FULL_DISK = """
import resource, sys
from pathlib import Path
from golfnb.settings import GolfError
from golfnb.text.shards import atomic_write, write_shard
path = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for write in (lambda: atomic_write(path, b"n" * 100_000), lambda: write_shard(path, [1] * 50_000)):
    try:
        write()
        sys.exit("nothing was refused")
    except GolfError as error:
        print(error)
"""


def test_full_disk_keeps_the_old_file(tmp_path):
    path = tmp_path / "precious.bin"
    atomic_write(path, "old")
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all("precious.bin" in line and "bytes free" in line for line in lines)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["precious.bin"], "old contents, no neighbour"


def test_atomic_write_makes_directories_and_leaves_no_neighbour_on_interrupt(tmp_path, monkeypatch):
    atomic_write(tmp_path / "a" / "b" / "c.txt", "text: \u00e9")
    assert (tmp_path / "a" / "b" / "c.txt").read_bytes() == "text: \u00e9".encode()
    def interrupted(fd): raise KeyboardInterrupt
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        atomic_write(tmp_path / "a" / "b" / "c.txt", "new")
    assert (tmp_path / "a" / "b" / "c.txt").read_bytes() == "text: \u00e9".encode() and len(list((tmp_path / "a" / "b").iterdir())) == 1
    (tmp_path / "file").touch()
    with pytest.raises(GolfError, match=f"{tmp_path / 'file'}"):
        atomic_write(tmp_path / "file" / "below", b"")
    assert HEADER_BYTES == 1024


def test_many_headers_are_read_and_validated_once(tmp_path):
    from golfnb.text.loader import CoprimeSampler

    for i in range(200):
        (tmp_path / f"fineweb_train_{i:06d}.bin").write_bytes(header(tokens=40) + bytes(80))
    before = _checked_header.cache_info().misses
    paths = find_shards(tmp_path / "fineweb_train_*.bin")
    for rank in range(3):
        sampler = CoprimeSampler(paths, rank, 3, 64, 16, seed=1)
        for _ in range(5):
            next(sampler)
    assert _checked_header.cache_info().misses - before == 200, "each header was read once"


@given(parts=st.lists(st.lists(st.integers(0, 65_535), max_size=50), min_size=1, max_size=6).filter(any))
@settings(max_examples=25, deadline=None)
def test_writing_in_pieces_is_writing_at_once(tmp_path_factory, parts):
    folder = tmp_path_factory.mktemp("w")
    writer = ShardWriter(folder / "a.bin")
    for part in parts:
        writer.write(np.array(part, np.uint16))
    facts = writer.close()
    write_shard(folder / "b.bin", sum(parts, []))
    assert (folder / "a.bin").read_bytes() == (folder / "b.bin").read_bytes() and facts["tokens"] == sum(map(len, parts))
    ShardWriter(folder / "c.bin").abort()
    assert sorted(p.name for p in folder.iterdir()) == ["a.bin", "b.bin"]
