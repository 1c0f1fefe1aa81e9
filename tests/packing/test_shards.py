"""Conversions shard by shard: from a small Hub with faults, and of a directory whose files are deleted meanwhile."""

import errno
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import forked
import goldens
import pytest
from small_hub import SmallHub, connected
from tiny_models import child_environment

from moeflux_mlx.convert import convert, main
from moeflux_mlx.errors import ModelFileError, MoefluxWarning, RequestError
from moeflux_mlx.formats.packed import STATE
from moeflux_mlx.packing import shards
from moeflux_mlx.packing.supply import INCOMING, JOURNAL, SHARDS, Listing
from moeflux_mlx.packing.writer import PARTIAL

ROOT = Path(__file__).resolve().parents[2]
COUNT = 4
NAMES = [f"model-{i + 1:05d}-of-{COUNT:05d}.safetensors" for i in range(COUNT)]


def split(path, family, variant, shuffled=False):
    """Writes a checkpoint in `COUNT` shards of about the same size, with tensors in the order of names or shuffled."""
    goldens.write_variant(path, family, variant)
    (path / "model.safetensors").unlink(missing_ok=True)
    tensors = goldens.variant_tensors(family, variant)
    total, done, where = sum(array.nbytes for _, array in tensors.values()), 0, {}
    for i, name in enumerate(sorted(tensors)):
        where[name] = NAMES[i * 7 % COUNT if shuffled else min(COUNT * done // total, COUNT - 1)]
        done += tensors[name][1].nbytes
    for file in NAMES:
        goldens.write_safetensors(path / file, {name: tensors[name] for name in where if where[name] == file})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


def tree(path):
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != STATE
    }


def allocated(path):
    """Returns the bytes of disk used below `path`."""
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Returns a checkpoint. Do not write into it."""
    return split(tmp_path_factory.mktemp("source") / "checkpoint", "qwen3_moe", "hub")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, source):
    """Returns the conversion of `source` in one piece."""
    out = tmp_path_factory.mktemp("whole") / "out"
    convert(source, out)
    return tree(out)


@pytest.fixture
def hub(source, tmp_path):
    with SmallHub(source) as served, connected(served, tmp_path / "cache") as served.environment:
        yield served


# ---- from the hub ----


def test_a_repository_gives_the_same_files_with_at_most_two_shards_on_the_disk(hub, source, whole, tmp_path):
    out, steps, most = tmp_path / "out", [], 0

    def progress(*step):
        nonlocal most
        steps.append(step)
        here = list((out / INCOMING).rglob("*.safetensors")) if out.exists() else []
        assert len(here) <= 2
        most = max(most, allocated(out))

    convert("org/model", out, progress=progress)
    assert tree(out) == whole
    assert hub.fetched() == NAMES
    largest = max((source / name).stat().st_size for name in NAMES)
    assert most <= sum(map(len, whole.values())) + 2 * largest + 100_000
    assert all(a[0] <= b[0] for a, b in zip(steps, steps[1:], strict=False)) and steps[-1][0] == steps[-1][1]
    cached = [file for file in (tmp_path / "cache").rglob("*.safetensors")]
    assert not cached  # nothing large is in the Hub's cache


@pytest.mark.parametrize(
    ("family", "variant", "shuffled"),
    [
        ("qwen3_5_moe", "mlx4", False),
        ("qwen3_5_moe", "mlx4", True),  # codes and scales in different shards
        ("qwen3_5_moe", "hub", False),
        ("deepseek_v3", "hub", True),  # block fp8: codes and their scales
    ],
)
def test_every_kind_of_checkpoint_gives_the_same_files(tmp_path, family, variant, shuffled):
    source = split(tmp_path / "source", family, variant, shuffled)
    convert(source, tmp_path / "whole")
    with SmallHub(source) as hub, connected(hub, tmp_path / "cache"):
        convert("org/model", tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_finished_conversion_downloads_nothing_and_a_damaged_file_only_what_it_needs(hub, whole, tmp_path):
    out = tmp_path / "out"
    convert("org/model", out)
    hub.requests.clear()
    assert len(convert("org/model", out).kept) == 4 and not hub.fetched()
    layer = out / "packed_experts" / "layer_00.bin"
    layer.write_bytes(bytes(layer.stat().st_size))
    report = convert("org/model", out)
    assert report.repaired == ("packed_experts/layer_00.bin",) and tree(out) == whole
    assert 0 < len(hub.fetched()) < COUNT


def test_downloads_continue_after_cut_connections(hub, source, whole, tmp_path):
    size = (source / NAMES[1]).stat().st_size
    hub.cut = {NAMES[1]: [size // 2, size // 4]}
    with pytest.warns(MoefluxWarning, match="does not answer, trying again: Error while downloading from .*$"):
        convert("org/model", tmp_path / "out")
    assert tree(tmp_path / "out") == whole and not hub.cut[NAMES[1]]
    assert len([one for one in hub.requests if one[1] == NAMES[1] and one[2] and one[2].endswith("-")]) == 2


def test_a_wrong_shard_is_downloaded_again_and_refused_the_second_time(hub, whole, tmp_path):
    hub.wrong = {NAMES[1]: 1, NAMES[2]: 2}
    with pytest.raises(ModelFileError, match=f"{NAMES[2]} was damaged twice: SHA-256 is [0-9a-f]+, not [0-9a-f]+;"):
        convert("org/model", tmp_path / "out")
    assert not list((tmp_path / "out" / INCOMING).glob("*.safetensors"))
    assert hub.fetched() == [NAMES[0], NAMES[1], NAMES[1], NAMES[2], NAMES[2]]
    convert("org/model", tmp_path / "out")
    assert hub.fetched()[5:] == NAMES[2:] and tree(tmp_path / "out") == whole


KILLED = """
import os, signal, sys
from moeflux_mlx.convert import convert
def progress(done, total, name):
    if name == sys.argv[3] and done >= int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
convert(sys.argv[1], sys.argv[2], delete_source=sys.argv[5] == "delete", progress=progress)
"""


def killed(source, out, name, environment=None, how="keep"):
    """Runs a conversion whose process is killed as soon as it prints `name`, while work is in progress."""
    assert forked.run(KILLED, source, out, name, "1", how, **(environment or {}))[0] == -signal.SIGKILL


class Stopped(Exception):
    pass


def stopped(source, out, name, **options):
    """Does the same in this process: nothing is cleaned up on the way out."""

    def progress(done, total, what):
        if what == name and done:
            raise Stopped

    with pytest.raises(Stopped):
        convert(source, out, progress=progress, **options)


STEPS = [
    (killed, f"download {NAMES[2]}"),
    (killed, f"pack {NAMES[2]}"),
    (stopped, f"pack {NAMES[0]}"),
    (stopped, "check packed_experts/layer_01.bin"),
]


@pytest.mark.parametrize(("ended", "name"), STEPS)
def test_after_an_interruption_it_continues_at_the_last_shard(hub, whole, tmp_path, ended, name):
    out = tmp_path / "out"
    ended("org/model", out, name, **({"environment": hub.environment} if ended is killed else {}))
    assert not (out / "packed_experts" / "layout.json").exists()
    hub.requests.clear()
    convert("org/model", out)
    done = {"download": 2, "pack": 1 + NAMES.index(name[-len(NAMES[0]) :]) if name[0] == "p" else 0, "check": COUNT}
    assert hub.fetched() == NAMES[done[name.split()[0]] :]  # a shard that had arrived completely is not requested again
    assert tree(out) == whole


def test_what_a_journal_says_of_a_lost_file_is_forgotten(hub, whole, tmp_path):
    out = tmp_path / "out"
    stopped("org/model", out, f"download {NAMES[3]}")
    (out / f"resident.safetensors{PARTIAL}").unlink()
    convert("org/model", out)
    assert tree(out) == whole


def test_a_moved_branch_does_not_matter_to_a_conversion_that_has_begun(hub, whole, tmp_path):
    out = tmp_path / "out"
    stopped("org/model", out, f"pack {NAMES[1]}")
    begun, hub.commit = hub.commit, "f" * 40
    assert json.loads((out / SHARDS).read_text())["commit"] == begun
    convert("org/model", out)
    assert tree(out) == whole
    assert Listing.read(out, alone=False) is None and not any((tmp_path / "cache").rglob("f" * 40))


# ---- the disk ----


def test_a_disk_that_is_too_small_is_found_before_a_shard_comes(hub, tmp_path, free_disk):
    free_disk(100_000)
    with pytest.raises(ModelFileError, match="more bytes .* and 100000 .* are free; free some disk space"):
        convert("org/model", tmp_path / "out")
    assert not hub.fetched()


@pytest.fixture
def write_by(monkeypatch):
    """Returns a function that replaces `os.pwrite`."""
    return lambda write: monkeypatch.setattr(shards.os, "pwrite", write)


def test_a_disk_that_fills_up_on_the_way(hub, whole, tmp_path, write_by):
    real, room = os.pwrite, [300_000]

    def pwrite(descriptor, data, offset):
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    write_by(pwrite)
    with pytest.raises(ModelFileError, match="cannot be written: No space left on device; run the same command"):
        convert("org/model", tmp_path / "out")
    room[0] = 1 << 40
    convert("org/model", tmp_path / "out")
    assert tree(tmp_path / "out") == whole


def test_a_shard_is_kept_if_reading_back_fails(hub, whole, tmp_path, write_by):
    real, lost = os.pwrite, [3]

    def pwrite(descriptor, data, offset):
        lost[0] -= 1
        return len(data) if lost[0] == 0 else real(descriptor, data, offset)

    write_by(pwrite)
    with pytest.raises(
        ModelFileError, match=f"has other bytes than those made from {NAMES[0]}, read back from the disk"
    ):
        convert("org/model", tmp_path / "out")
    assert not (tmp_path / "out" / JOURNAL).exists()


# ---- a directory that is deleted on the way ----


@pytest.fixture
def own(source, tmp_path):
    return shutil.copytree(source, tmp_path / "own")


def test_a_directory_s_shards_are_deleted_one_by_one(own, whole, tmp_path):
    out, most = tmp_path / "out", 0

    def progress(*_):
        nonlocal most
        most = max(most, allocated(tmp_path / "out") + sum(file.stat().st_size for file in own.glob("*.safetensors")))

    sizes = [file.stat().st_size for file in own.glob("*.safetensors")]
    convert(own, out, delete_source=True, progress=progress)
    assert tree(out) == whole and not list(own.glob("*.safetensors"))
    assert (own / "config.json").exists()
    assert most < sum(sizes) + sum(map(len, whole.values())) / 2  # never both complete
    assert not (out / JOURNAL).exists() and not (out / SHARDS).exists()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_killed_conversion_continues_without_the_deleted_shards(own, whole, tmp_path, at_once, capsys):
    out = tmp_path / "out"
    if at_once:
        killed(own, out, f"pack {NAMES[2]}", how="delete")
    else:
        stopped(own, out, "check packed_experts/layer_01.bin", delete_source=True)
    assert len(list(own.glob("*.safetensors"))) == (2 if at_once else 0)
    assert main(["--hf-path", str(own), "--mlx-path", str(out), "--delete-source", "--yes"]) == 0
    assert f"{own}: shards deleted\n" in capsys.readouterr().err
    assert tree(out) == whole and not list(own.glob("*.safetensors"))


def test_what_was_packed_already_is_compared_before_it_is_deleted(own, whole, tmp_path):
    out = tmp_path / "out"
    convert(own, out)
    state = (out / STATE).read_text()
    convert(own, out, delete_source=True)
    assert not list(own.glob("*.safetensors")) and tree(out) == whole and state


def links(own, other):
    (own / NAMES[1]).rename(other / "blob")
    (own / NAMES[1]).symlink_to(other / "blob")


def second_names(own, other):
    os.link(own / NAMES[1], other / "blob")


@pytest.mark.parametrize("shared", [links, second_names])
def test_what_others_share_is_never_deleted(own, tmp_path, shared):
    other = tmp_path / "other"
    other.mkdir()
    shared(own, other)
    before = tree(own)
    with pytest.raises(ModelFileError, match=f"{NAMES[1]} (is|has) a .*; nothing was deleted: leave --delete-source"):
        convert(own, tmp_path / "out", delete_source=True)
    assert tree(own) == before


@pytest.mark.parametrize("shared", [links, second_names])
def test_a_file_that_becomes_shared_meanwhile_is_not_deleted(own, whole, tmp_path, shared):
    other = tmp_path / "other"
    other.mkdir()

    def progress(done, total, name):
        if name == f"pack {NAMES[0]}" and not list(other.iterdir()):
            shared(own, other)

    convert(own, tmp_path / "out", delete_source=True, progress=progress)
    assert (own / NAMES[1]).exists() and (other / "blob").exists() and not (own / NAMES[0]).exists()
    assert tree(tmp_path / "out") == whole


def test_a_directory_that_is_a_link_is_refused(own, tmp_path):
    """The link's target may belong to others."""
    (tmp_path / "link").symlink_to(own, target_is_directory=True)
    before = sorted(own.iterdir())
    with pytest.raises(ModelFileError, match="is a link to .* give that one, or leave --delete-source out"):
        convert(tmp_path / "link", tmp_path / "out", delete_source=True)
    assert sorted(own.iterdir()) == before


def test_the_advice_never_deletes_the_only_copy(own, tmp_path):
    stopped(own, tmp_path / "out", f"pack {NAMES[2]}", delete_source=True)
    with pytest.raises(ModelFileError, match="with other options; choose another directory; this one may hold all"):
        convert(own, tmp_path / "out", delete_source=True, q_bits=8)


def test_a_shard_that_changed_is_refused(own, tmp_path):
    stopped(own, tmp_path / "out", f"pack {NAMES[2]}", delete_source=True)
    os.utime(own / NAMES[3], ns=(0, 0))
    with pytest.raises(ModelFileError, match=f"{NAMES[3]} is not the file that this conversion began with"):
        convert(own, tmp_path / "out", delete_source=True)


def test_a_deleted_and_lost_shard_is_reported(own, tmp_path):
    stopped(own, tmp_path / "out", f"pack {NAMES[2]}", delete_source=True)
    (tmp_path / "out" / f"resident.safetensors{PARTIAL}").unlink()
    with pytest.raises(ModelFileError, match=f"{NAMES[0]} was packed and deleted, but its converted form is gone"):
        convert(own, tmp_path / "out", delete_source=True)


@pytest.mark.parametrize("ends_at", ["packed_experts/layer_01.bin", STATE])
def test_ended_between_a_file_s_name_and_its_note_nothing_is_lost(own, whole, tmp_path, monkeypatch, ends_at):
    """The shards are already deleted. The file may get its name before the note, or after it."""
    real, out = os.replace, tmp_path / "out"

    def rename(partial, file):
        real(partial, file)
        if Path(file) == out / ends_at and not list(own.glob("*.safetensors")):
            raise Stopped

    monkeypatch.setattr(os, "replace", rename)
    with pytest.raises(Stopped):
        convert(own, out, delete_source=True)
    monkeypatch.undo()
    assert not convert(own, out, delete_source=True).repaired
    assert tree(out) == whole


def test_a_second_process_that_was_stopped_in_between_changes_nothing(own, whole, tmp_path, monkeypatch):
    """The second process requests the directory after the first one has finished and deleted the shards."""
    real, out = fcntl.flock, tmp_path / "out"

    def flock(descriptor, how):
        monkeypatch.undo()
        convert(own, out, delete_source=True)
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ModelFileError, match=f"{out} is finished, and {own} has no shards any more"):
        convert(own, out, delete_source=True)
    assert tree(out) == whole and not list(own.glob("*.safetensors"))
    assert json.loads((out / STATE).read_text())["files"]


def test_a_conversion_that_ends_while_the_journal_is_removed_is_finished_later(hub, own, whole, tmp_path, monkeypatch):
    real, out = Path.unlink, tmp_path / "out"

    def unlink(path, **options):
        real(path, **options)
        if path.name in (JOURNAL, SHARDS):
            raise Stopped

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(Stopped):
        convert(own, out, delete_source=True)
    monkeypatch.undo()
    assert (out / JOURNAL).exists() and not (out / SHARDS).exists()
    with pytest.raises(ModelFileError, match=f"{out} is finished, and {own} has no shards any more"):
        convert(own, out, delete_source=True)
    assert (tree(out).keys() - {JOURNAL}) == whole.keys()


def test_a_shard_is_deleted_only_when_all_that_was_written_is_durable(own, tmp_path, monkeypatch, write_by):
    pwrite, sync, unlink, unsynced, gone = os.pwrite, shards.sync, Path.unlink, set(), []

    def write(descriptor, data, offset):
        unsynced.add(os.fstat(descriptor).st_ino)
        return pwrite(descriptor, data, offset)

    def durable(descriptor):
        sync(descriptor)
        unsynced.discard(os.fstat(descriptor).st_ino)

    def delete(path, **options):
        if path.parent == own:
            gone.append(path.name)
            assert not unsynced
        unlink(path, **options)

    write_by(write)
    monkeypatch.setattr(shards, "sync", durable)
    monkeypatch.setattr(Path, "unlink", delete)
    convert(own, tmp_path / "out", delete_source=True)
    assert gone == NAMES


def test_a_new_file_s_name_is_durable_before_a_shard_is_deleted(own, tmp_path, monkeypatch):
    real, last = shards.sync_folder, []
    monkeypatch.setattr(shards, "sync_folder", lambda folder: (last.append(folder), real(folder)))
    stopped(own, tmp_path / "out", f"pack {NAMES[0]}", delete_source=True)
    assert set(last) == {tmp_path / "out", tmp_path / "out" / "packed_experts"}


@pytest.mark.parametrize("change", [{"name": "../own/config.json"}, {"size": "1"}, {"head": None}])
def test_a_listing_that_names_other_files_is_refused(own, tmp_path, change):
    out = tmp_path / "out"
    stopped(own, out, f"pack {NAMES[1]}", delete_source=True)
    listing = json.loads((out / SHARDS).read_text())
    listing["shards"][0].update(change)
    (out / SHARDS).write_text(json.dumps(listing))
    with pytest.raises(ModelFileError, match=f"{SHARDS} is damaged; files of the checkpoint may have been .* deleted"):
        convert(own, out, delete_source=True)


def test_progress_counts_what_is_downloaded(hub, source, tmp_path):
    steps = []
    convert("org/model", tmp_path / "out", progress=lambda *step: steps.append(step))
    during = [done for done, _, what in steps if what == f"download {NAMES[0]}"]
    size = (source / NAMES[0]).stat().st_size
    assert during[-1] - during[0] == size and len(during) > size >> 17


@pytest.mark.parametrize("damaged", [JOURNAL, STATE])
@pytest.mark.parametrize("alone", [True, False])
def test_what_to_do_with_a_damaged_directory_depends_on_what_was_deleted(hub, own, tmp_path, damaged, alone):
    out, checkpoint = tmp_path / "out", own if alone else "org/model"
    stopped(checkpoint, out, f"pack {NAMES[2]}", delete_source=alone)
    entry = {"files": 1} if damaged == STATE else {NAMES[0]: "all"}
    (out / damaged).write_text(json.dumps({**json.loads((out / damaged).read_text()), **entry}))
    remedy = "download what is missing of them" if alone else f"delete {out} and convert again"
    with pytest.raises(ModelFileError, match=f"{damaged} is damaged; .*{remedy}"):
        convert(checkpoint, out, delete_source=alone)


def test_deleting_needs_a_local_directory(hub, own, tmp_path):
    with pytest.raises(ModelFileError, match=r"holds no \*.safetensors, .*: leave --delete-source out"):
        convert(tmp_path, tmp_path / "out", delete_source=True)
    with pytest.raises(ModelFileError, match="nowhere does not exist"):
        convert(tmp_path / "nowhere", tmp_path / "out", delete_source=True)
    convert(own, tmp_path / "packed")
    with pytest.raises(ModelFileError, match="packed is already packed and has no shards to delete"):
        convert(tmp_path / "packed", tmp_path / "out", delete_source=True)
    with pytest.raises(RequestError, match="org/model is a repository, whose shards are never kept"):
        convert("org/model", tmp_path / "out", delete_source=True)


def test_without_a_terminal_nobody_is_asked(own, tmp_path, capsys):
    before = tree(own)
    assert main(["--hf-path", str(own), "--mlx-path", str(tmp_path / "out"), "--delete-source"]) == 1
    assert re.search(r"deleted one by one.*there is no terminal to ask on: add --yes", capsys.readouterr().err)
    assert tree(own) == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("y", 0)])
def test_a_terminal_is_asked(own, tmp_path, answer, code):
    command = [sys.executable, "-m", "moeflux_mlx.convert", "--hf-path", str(own), "--mlx-path", str(tmp_path / "out")]
    here, there = pty.openpty()
    os.write(here, f"{answer}\n".encode())
    done = subprocess.run(
        [*command, "--delete-source"], env=child_environment(), stdin=there, stdout=there, stderr=there
    )
    os.close(there)
    assert done.returncode == code
    assert len(list(own.glob("*.safetensors"))) == (COUNT if code else 0)
    os.close(here)
