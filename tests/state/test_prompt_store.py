"""Saved prompts: what is restored, what is refused, and what survives crashes, full disks and other processes."""

import contextlib
import hashlib
import json
import os
import resource
import shutil
import signal
import struct
import time
import zlib
from dataclasses import replace
from pathlib import Path

import forked
import mlx.core as mx
import numpy as np
import pytest
from goldens import FAMILIES
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ROOT, child_environment, tiny_directory, tiny_model

from moeflux_mlx import model_fingerprint, save_state
from moeflux_mlx.driving.session import Session
from moeflux_mlx.errors import FingerprintError, ModelFileError, PromptCacheError, RequestError
from moeflux_mlx.ops import backend
from moeflux_mlx.spec import ModelArgs
from moeflux_mlx.state import prompt_file
from moeflux_mlx.state.prompt_file import START, VERSION, load_prompt, read_prompt_header, save_prompt
from moeflux_mlx.state.prompt_store import PromptDirectory, reuse_prefix
from moeflux_mlx.text.tokenizer import load_tokenizer

N = 40
ROUNDING = 1e-4 if backend.has_kernels() else 2e-5  # a GPU multiplies a single row with other kernels than a span
ATTENTION, RECURRENT = "qwen3_moe", "qwen3_next"
HERE = Path(__file__).parents[1]


def text(n=N, seed=0):
    return np.random.default_rng(seed).integers(0, 240, n).tolist()


def absorbed(model, tokens):
    cache = model.make_cache()
    if tokens:
        model(mx.array(tokens, mx.uint32)[None], cache)
    mx.eval([layer.state for layer in cache])
    return cache


def printed(family, dtype=mx.float32):
    return model_fingerprint(tiny_directory(family), dtype)


def directory(path, family=ATTENTION, max_bytes=1 << 30):
    return PromptDirectory(path, printed(family), max_bytes)


def keep(store, model, tokens):
    store.save(model, absorbed(model, tokens), tokens)


def restored(store, model, tokens, **options):
    """Returns (the number of tokens, the state) after `reuse_prefix` into new caches."""
    cache = model.make_cache()
    return reuse_prefix(model, cache, tokens, store, **options), cache


def files(path):
    return sorted(file.name for file in path.iterdir())


def same_logits(model, one, other):
    token = mx.array([[7]], mx.uint32)
    return mx.array_equal(model(token, one), model(token, other)).item()


# ---- what is restored ----


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
def test_the_same_prompt_gives_the_same_answer_after_a_restart(family, tmp_path):
    def run():
        store = PromptDirectory(tmp_path / "store", printed(family))
        session = Session(tiny_model(family, mx.float32), tokenizer, store=store)
        responses = list(session.respond(text(), max_tokens=4))
        assert session.save_error is None
        return session.reuse, [r.token for r in responses], [np.array(r.logprobs) for r in responses]

    tokenizer = load_tokenizer(tiny_directory(family))
    first, tokens, wanted = run()
    again, again_tokens, got = run()
    assert (first.disk, again.disk, again.computed) == (0, N - 1, 1) and tokens == again_tokens
    for one, other in zip(wanted, got, strict=True):  # the last token had a span of its own
        np.testing.assert_allclose(one, other, atol=ROUNDING)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_for_the_store_does_not_double_the_caches(tmp_path, family):
    """Keys and values are copied from the caches afterwards. They are those of the boundary, whatever followed it."""
    tokenizer, store = load_tokenizer(tiny_directory(family)), directory(tmp_path, family)
    session = Session(tiny_model(family, mx.float32), tokenizer, store=store)
    responses = session.respond(text(), boundaries=[20, 30], max_tokens=8)
    next(responses)
    ends = [end for end, _ in session.to_store]
    assert ends == ([30] if session.points.can_trim else [20, 30])
    for _, kept in session.to_store:
        assert not any(session.cache[i].is_trimmable() for i in kept)
    list(responses)
    for end in ends:
        n, cache = restored(store, session.model, text()[: end + 1])
        assert n == end
        for layer, want in zip(cache, absorbed(session.model, text()[:end]), strict=True):
            for got, array in zip(layer.state[:2], want.state[:2], strict=True):
                np.testing.assert_allclose(held(got, layer), held(array, want), atol=5e-5)


def held(array, layer):
    return np.array(array[..., : layer.offset, :] if layer.is_trimmable() else array)


def test_bfloat16_is_restored_exactly(tmp_path):
    model = tiny_model(RECURRENT, mx.bfloat16)
    store = PromptDirectory(tmp_path, printed(RECURRENT, mx.bfloat16))
    cache = absorbed(model, text(6))
    store.save(model, cache, text(6))
    n, other = restored(store, model, text(7))
    assert n == 6 and same_logits(model, cache, other)


def test_the_longest_saved_prefix_is_taken(tmp_path):
    model = tiny_model(RECURRENT, mx.float32)
    store = directory(tmp_path, RECURRENT)
    for n in (10, 30, 20):
        keep(store, model, text(n))
    keep(store, model, text(35)[:-1] + [1])
    assert [restored(store, model, text(n))[0] for n in (40, 31, 30, 11, 10)] == [30, 30, 20, 10, 0]
    assert restored(store, model, text(40), longer_than=30)[0] == 0
    n, cache = restored(store, model, text())
    assert save_state(model, cache) == save_state(model, absorbed(model, text(n)))


def test_attention_caches_are_cut_where_the_texts_diverge(tmp_path):
    model = tiny_model(ATTENTION, mx.float32)
    store = directory(tmp_path)
    keep(store, model, text(30))
    parting = text(20) + text(15, 1)
    n, cache = restored(store, model, parting)
    assert n == 20 and {layer.offset for layer in cache} == {20}
    assert restored(store, model, text(30))[0] == 29
    assert restored(store, model, text(5, 2))[0] == 0


def test_a_saved_text_that_holds_another_makes_it_superfluous(tmp_path):
    model = tiny_model(ATTENTION, mx.float32)
    store = directory(tmp_path)
    keep(store, model, text(10))
    before = files(tmp_path)
    keep(store, model, text(20))
    assert len(files(tmp_path)) == 1 and files(tmp_path) != before
    keep(store, model, text(15))
    assert len(files(tmp_path)) == 1
    keep(store, model, text(15, 1))
    assert len(files(tmp_path)) == 2


def test_nobody_else_may_read_what_is_saved(tmp_path):
    keep(directory(tmp_path, RECURRENT), tiny_model(RECURRENT, mx.float32), text(10))
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0


# ---- what belongs to something else ----


def changed(source, target, name, at=None):
    """Returns a copy of a model directory in which one byte of one file differs."""
    shutil.copytree(source, target)
    data = bytearray((target / name).read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    (target / name).write_bytes(data)
    return target


SHAPES = {
    "qwen3.6-35b-a3b": "a708fd3b5984ae1f",
    "cogito-v2-671b": "774c84baba3c949a",
    "deepseek-v3.2": "72df1d7b302db2d4",
    "deepseek-v4-flash": "4cb3d4cdae656d59",
    "gemma-4-26b-a4b": "383d3f3c58b69d6d",
    "glm-5-744b": "e97c554a67f78d2a",
    "glm-5.3-flash-321b": "79eefae42fb7587d",
    "gpt-oss-20b": "11e3af8e6203eaaa",
    "minimax-m3-428b": "02ab70b2f3ecce29",
    "nemotron-3-nano-30b-a3b": "533496a4ed86d1fa",
    "qwen3.8-flash-next-125b": "debcb806e39ee4d9",
}


@pytest.mark.parametrize("variant", SHAPES)
def test_prompts_that_were_saved_long_ago_keep_their_model(variant, tmp_path):
    """The parts of the configuration in a fingerprint are the same from release to release."""
    shutil.copy(ROOT / "configs" / f"{variant}.json", tmp_path / "config.json")
    text = json.dumps(prompt_file.shape_of(ModelArgs.from_file(tmp_path)), sort_keys=True, default=str)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == SHAPES[variant]


def test_fingerprints_follow_contents(tmp_path):
    source = tiny_directory(ATTENTION)
    here = printed(ATTENTION)
    copy = shutil.copytree(source, tmp_path / "copy")
    os.utime(copy / "resident.safetensors", (0, 0))
    assert model_fingerprint(copy, mx.float32) == here
    (copy / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text())))
    assert model_fingerprint(copy, mx.float32) == here
    for name in ("resident.safetensors", "packed_experts/layer_01.bin"):
        other = changed(source, tmp_path / name.replace("/", "-"), name, at=-100)
        assert model_fingerprint(other, mx.float32).difference(here) == "another model"
    other = changed(source, tmp_path / "t", "tokenizer.json")
    assert model_fingerprint(other, mx.float32).difference(here) == "another tokenizer"
    assert printed(ATTENTION, mx.bfloat16).difference(here) == "another cache dtype"
    assert len({printed(family).key for family in FAMILIES} | {printed(ATTENTION, mx.bfloat16).key}) == 5
    (copy / "config.json").unlink()
    with pytest.raises(ModelFileError, match="config.json"):
        model_fingerprint(copy, mx.float32)


@pytest.mark.parametrize("part", ["model", "tokenizer", "dtype"])
def test_files_of_something_else_are_refused(part, tmp_path):
    model, fingerprint = tiny_model(ATTENTION, mx.float32), printed(ATTENTION)
    foreign = replace(fingerprint, **{part: "other"})
    save_prompt(tmp_path / "file", model, absorbed(model, text(10)), text(10), foreign)
    before = (tmp_path / "file").read_bytes()
    cache = absorbed(model, text(3))
    states = [layer.state for layer in cache]
    with pytest.raises(FingerprintError, match="another"):
        load_prompt(tmp_path / "file", model, cache, fingerprint)
    assert all(a is b for x, layer in zip(states, cache, strict=True) for a, b in zip(x, layer.state, strict=True))
    assert (tmp_path / "file").read_bytes() == before
    keep(PromptDirectory(tmp_path / "dir", foreign), model, text(10))
    assert restored(PromptDirectory(tmp_path / "dir", fingerprint), model, text())[0] == 0
    assert len(files(tmp_path / "dir")) == 1


# ---- damage ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns a file of three tokens, and its bytes."""
    path = tmp_path_factory.mktemp("saved") / "prompt"
    model = tiny_model(RECURRENT, mx.float32)
    save_prompt(path, model, absorbed(model, text(3)), text(3), printed(RECURRENT))
    return path, path.read_bytes()


def refused(path, data, match=None):
    model = tiny_model(RECURRENT, mx.float32)
    path.write_bytes(data)
    cache = model.make_cache()
    with pytest.raises(PromptCacheError, match=match):
        load_prompt(path, model, cache, printed(RECURRENT))
    assert all(layer.empty() for layer in cache)


@given(data=st.data())
@settings(max_examples=examples(80))
def test_every_flipped_bit_and_every_cut_is_noticed(saved, data):
    path, good = saved
    at = data.draw(st.integers(0, 400) | st.integers(0, len(good) - 1))
    bad = bytearray(good)
    if data.draw(st.booleans()):
        bad[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del bad[at:]
    refused(path.with_name("bad"), bytes(bad))


def rebuilt(good, *, metadata=None, tokens=None, start=None, body=None):
    """Returns the file with another part and correct checksums."""
    magic, version, size, count, _ = START.unpack_from(good)
    old = good[START.size : START.size + size]
    end = START.size + size + 4 * count
    metadata = old if metadata is None else metadata
    ids = good[START.size + size : end] if tokens is None else tokens
    body = good[end + 4 : -4] if body is None else body
    head = START.pack(magic, version, len(metadata), len(ids) // 4, len(body)) if start is None else start
    parts = [head + metadata + ids, body]
    return b"".join(part + struct.pack("<I", zlib.crc32(part)) for part in parts)


def test_wrong_values_in_well_formed_files_are_noticed(saved):
    path, good = saved
    path = path.with_name("lie")
    assert rebuilt(good) == good
    huge = START.pack(b"MOEFLXPC", VERSION, 2**32 - 1, 2**64 - 1, 2**64 - 1)
    refused(path, rebuilt(good, start=huge), "header is wrong")
    refused(path, rebuilt(good, start=START.pack(b"MOEFLXPC", VERSION, 8, 2**20, 8)), "length is wrong")
    refused(path, good + b"x", "length is wrong")
    refused(path, rebuilt(good, tokens=bytes(16)), "token count is wrong")
    body = good[-4 - START.unpack_from(good)[-1] : -4]
    for snapshot in (b"", body[:3], b"MXLF" + body[4:], body[:4] + b"\xff" * 4 + body[8:], body[:-1], body[:200]):
        refused(path, rebuilt(good, body=snapshot), "is damaged: .*snapshot.*; delete it")
    parts = {"model": "a", "tokenizer": "b", "dtype": "c"}
    for value in ([], {}, {"fingerprint": parts}, {"fingerprint": {**parts, "model": 1}, "extra": {}}, 3):
        refused(path, rebuilt(good, metadata=json.dumps(value).encode()), "metadata")
    refused(path, rebuilt(good, metadata=b"[" * 100_000), "metadata")
    refused(path, rebuilt(good, metadata=b"\xff\xfe"), "metadata")
    refused(path, b"", "not a prompt cache file")
    refused(path, good[:12], "header is wrong")
    refused(path, b"GGUF" + good[4:], "not a prompt cache file")
    refused(path, good[:8] + struct.pack("<I", 9) + good[12:], "version 9")
    with pytest.raises(PromptCacheError, match="cannot be read"):
        read_prompt_header(path.parent)


def test_an_entry_that_cannot_be_read_now_is_kept(tmp_path, monkeypatch):
    store, model = directory(tmp_path), tiny_model(ATTENTION, mx.float32)
    keep(store, model, text(10))
    before = files(tmp_path)

    def full(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("mmap.mmap", full)
        assert restored(store, model, text())[0] == 0
    assert files(tmp_path) == before and restored(store, model, text())[0] == 10


def test_damaged_entries_are_skipped_and_removed(tmp_path):
    model = tiny_model(RECURRENT, mx.float32)
    store = directory(tmp_path, RECURRENT)
    for n in (10, 20, 30):
        keep(store, model, text(n))
    by_size = {read_prompt_header(tmp_path / name).tokens.size: tmp_path / name for name in files(tmp_path)}
    body = bytearray(by_size[30].read_bytes())
    body[-100] ^= 1
    by_size[30].write_bytes(body)
    by_size[20].write_bytes(by_size[20].read_bytes()[:50])
    assert restored(store, model, text())[0] == 10
    assert files(tmp_path) == [by_size[10].name]
    good = by_size[10].read_bytes()
    by_size[10].write_bytes(rebuilt(good, body=bytes(START.unpack_from(good)[-1])))
    assert restored(store, model, text())[0] == 0 and files(tmp_path) == []
    keep(store, model, text(10))
    assert restored(store, model, text())[0] == 10
    (tmp_path / "one").write_bytes(b"nonsense")
    with pytest.raises(PromptCacheError, match="one is not a prompt cache file"):
        load_prompt(tmp_path / "one", model, model.make_cache(), store.fingerprint)


# ---- room ----


def test_the_least_recently_used_is_removed_first(tmp_path):
    model = tiny_model(RECURRENT, mx.float32)
    store = directory(tmp_path, RECURRENT)
    keep(store, model, text(10))
    size = (tmp_path / files(tmp_path)[0]).stat().st_size
    store.max_bytes = 3 * size + size // 2
    keep(store, model, text(10, 1))
    keep(store, model, text(10, 2))
    for age, name in enumerate(files(tmp_path)):
        os.utime(tmp_path / name, (age, age))
    first = read_prompt_header(tmp_path / files(tmp_path)[0]).tokens.tolist()
    assert restored(store, model, first + [1])[0] == 10  # use makes it the most recent
    keep(store, model, text(10, 3))
    kept = [read_prompt_header(tmp_path / name).tokens.tolist() for name in files(tmp_path)]
    assert len(kept) == 3 and first in kept and text(10, 3) in kept


def test_a_text_that_others_go_on_with_is_removed_before_one_that_stands_alone(tmp_path):
    """Of a conversation that is saved at each turn, the last state stays, and those before it are spread."""
    model = tiny_model(RECURRENT, mx.float32)
    store = directory(tmp_path, RECURRENT)
    keep(store, model, text(30, 1))
    store.max_bytes = 4 * (tmp_path / files(tmp_path)[0]).stat().st_size
    for length in range(10, 31, 2):
        keep(store, model, text(length))
    kept = [read_prompt_header(tmp_path / name).tokens.tolist() for name in files(tmp_path)]
    assert text(30, 1) in kept and text(30) in kept
    assert any(10 <= len(one) <= 20 for one in kept)


def test_what_was_just_saved_stays_whatever_the_clock_says(tmp_path):
    """Other files may have dates in the future."""
    model = tiny_model(RECURRENT, mx.float32)
    store = directory(tmp_path, RECURRENT)
    keep(store, model, text(10))
    (old,) = tmp_path.iterdir()
    os.utime(old, (1 << 32, 1 << 32))
    store.max_bytes = old.stat().st_size
    keep(store, model, text(10, 1))
    assert restored(store, model, text(10, 1) + [1])[0] == 10 and not old.exists()


def test_a_state_beyond_the_limit_is_refused(tmp_path):
    model = tiny_model(RECURRENT, mx.float32)
    with pytest.raises(PromptCacheError, match="may hold 1000"):
        keep(directory(tmp_path, RECURRENT, 1000), model, text(10))
    assert files(tmp_path) == []
    session = Session(model, load_tokenizer(tiny_directory(RECURRENT)), store=directory(tmp_path, RECURRENT, 1000))
    assert len(list(session.respond(text(), max_tokens=2))) == 2
    assert "may hold 1000" in str(session.save_error)


def test_temporary_files_of_dead_writers_are_removed(tmp_path):
    model, store = tiny_model(ATTENTION, mx.float32), directory(tmp_path)
    for name, age in ((".dead.tmp", 3600), (".busy.tmp", 0)):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    keep(store, model, text(5))
    assert ".dead.tmp" not in files(tmp_path) and ".busy.tmp" in files(tmp_path)
    assert restored(store, model, text())[0] == 5


@contextlib.contextmanager
def no_file_beyond(size):
    """Makes this process fail to write past `size`, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_the_old_file(tmp_path):
    model, path = tiny_model(RECURRENT, mx.float32), tmp_path / "one"
    own = printed(RECURRENT)
    save_prompt(path, model, absorbed(model, text(10)), text(10), own)
    cache, before = absorbed(model, text(20)), path.read_bytes()
    for room in (0, 100, 60_000):
        with no_file_beyond(room), pytest.raises(PromptCacheError, match="cannot be written.*make room"):
            save_prompt(path, model, cache, text(20), own)
    assert path.read_bytes() == before and files(tmp_path) == ["one"]
    with pytest.raises(PromptCacheError, match="No such file"):
        save_prompt(tmp_path / "none" / "one", model, cache, text(20), own)
    with pytest.raises(PromptCacheError, match="cannot be made"):
        PromptDirectory(path, own)


# ---- other processes ----

WRITER = """
import sys, itertools
from pathlib import Path
sys.path[:0] = [{here!r}, {here!r} + "/support", {here!r} + "/state"]
import mlx.core as mx
from moeflux_mlx import load_model, model_fingerprint
from moeflux_mlx.state.prompt_file import save_prompt
from moeflux_mlx.state.prompt_store import PromptDirectory, reuse_prefix
from test_prompt_store import absorbed, text
model = load_model({model!r}, dtype=mx.float32)
fingerprint = model_fingerprint({model!r}, mx.float32)
"""
KILLED = """
states = [(absorbed(model, text(n, n)), text(n, n)) for n in (10, 20)]
for cache, tokens in itertools.cycle(states):
    save_prompt(Path({path!r}), model, cache, tokens, fingerprint)
    print("saved", flush=True)
"""
SHARING = """
store = PromptDirectory({path!r}, fingerprint, {size})
states = [(absorbed(model, text(10, n)), text(10, n)) for n in range(4)]
for turn in range(40):
    cache, tokens = states[(turn + {seed}) % 4]
    store.save(model, cache, tokens)
    cache, tokens = states[(turn + {seed} + 1) % 4]
    other = model.make_cache()
    n = reuse_prefix(model, other, tokens + [1], store)
    assert n in (0, 10), n
    same = all(mx.array_equal(a.recurrent, b.recurrent) for a, b in zip(other[:3], cache[:3])) if n else True
    assert same
"""


def start(script, **values):
    code = (WRITER + script).format(here=str(HERE), model=str(tiny_directory(RECURRENT)), **values)
    return forked.Child(code, environment=child_environment())


@pytest.mark.parametrize("delay", [0.0, 0.0013, 0.0047])
def test_killed_while_saving(tmp_path, delay):
    model = tiny_model(RECURRENT, mx.float32)
    path = tmp_path / "one"
    with start(KILLED, path=str(path)) as writer:
        for _ in range(3):
            assert writer.stdout.readline() == "saved\n"
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
    cache = model.make_cache()
    header = load_prompt(path, model, cache, printed(RECURRENT))
    n = len(header.tokens)
    assert header.tokens.tolist() == text(n, n) and n in (10, 20)
    assert same_logits(model, cache, absorbed(model, text(n, n)))


def test_two_processes_share_a_directory(tmp_path):
    store = directory(tmp_path, RECURRENT)
    keep(store, tiny_model(RECURRENT, mx.float32), text(10, 9))
    size = int(2.5 * (tmp_path / files(tmp_path)[0]).stat().st_size)
    workers = [start(SHARING, path=str(tmp_path), size=size, seed=seed) for seed in (0, 2)]
    assert [worker.communicate(timeout=120) and worker.returncode for worker in workers] == [0, 0]
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= size


# ---- required arguments ----


def test_states_that_do_not_fit_the_tokens(tmp_path):
    model = tiny_model(ATTENTION, mx.float32)
    path = tmp_path / "one"
    save_prompt(path, model, absorbed(model, text(5)), text(6), printed(ATTENTION))
    with pytest.raises(PromptCacheError, match="token count"):
        load_prompt(path, model, model.make_cache(), printed(ATTENTION))
    with pytest.raises(RequestError, match="make_cache"):
        save_prompt(path, model, [], text(6), printed(ATTENTION))
