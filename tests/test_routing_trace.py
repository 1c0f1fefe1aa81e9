"""Replays of routing traces: known sequences, and that no policy beats Belady's."""

import itertools
import json

import numpy as np
import routing_trace as trace
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_directory


def best_possible(keys, slots):
    """Returns the most hits of any replacement, found by trying them all."""
    pools = {frozenset(): 0}
    for key in keys:
        following = {}
        for pool, hits in pools.items():
            if key in pool:
                options = [(pool, hits + 1)]
            elif len(pool) < slots:
                options = [(pool | {key}, hits)]
            else:
                options = [((pool - {gone}) | {key}, hits) for gone in pool]
            for after, count in options:
                following[after] = max(following.get(after, 0), count)
        pools = following
    return max(pools.values())


@settings(max_examples=examples(100), deadline=None)
@given(keys=st.lists(st.integers(0, 5), max_size=14), slots=st.integers(1, 4))
def test_belady_is_the_best_possible(keys, slots):
    hits = trace.belady(np.array(keys, int), slots).sum()
    assert hits == best_possible(keys, slots) >= trace.lru(np.array(keys, int), slots).sum()


def test_least_recently_used_by_hand():
    assert trace.lru(np.array([1, 2, 1, 3, 2, 1]), 2).tolist() == [False, False, True, False, False, False]


def test_reuse_is_as_requested():
    rng = np.random.default_rng(0)
    for reuse in (0.0, 0.35, 0.9):
        made = trace.synthesize((200, 3, 8), 256, reuse, 0.0, rng)
        by_chance = 8 / 256
        assert abs(trace.previous_recall(made) - (reuse + (1 - reuse) * by_chance)) < 0.04
        assert all(len(set(row)) == 8 for row in itertools.chain(*made.tolist()))


def test_a_pool_with_the_previous_token_leaves_nothing_to_predict():
    made = trace.synthesize((200, 4, 8), 128, 0.35, 0.5, np.random.default_rng(0))
    row = trace.replay(made, 128, 200, recall=0.8)
    assert row["previous"] == 0 and 0.75 < row["predicted"] < 0.85
    assert row["lru"] < row["belady"]


def test_sequences_together_request_as_many_experts_as_asked():
    made = trace.synthesize_together((4, 150, 2, 8), 128, 0.35, 0.5, trace.UNIONS, np.random.default_rng(0))
    assert all(len(set(row)) == 8 for row in made.reshape(-1, 8).tolist())
    for count, union in ((1, 1.0), (2, 1.55), (4, 2.45)):
        asked = sum(map(len, trace.steps_of(made[:count])))
        assert abs(asked / made[0].size - union) < 0.04
    assert 0.35 < trace.previous_recall(made[0]) < 0.55, "what is kept, and some that come again by chance"
    alone, four = (trace.missed(trace.steps_of(made[:count]), 64) / count for count in (1, 4))
    assert 0.4 < four / alone < 0.75, "what rows share is read once"


def test_rows_of_wrong_drafts_share_as_many_experts_as_rows_of_the_text():
    made = trace.synthesize_drafts((3, 400, 2, 10), 512, 0.43, 0.5, np.random.default_rng(0))
    text, wrong, after = made
    for rows in ((text[:-1], text[1:]), (text[:-1], wrong[1:]), (wrong[:-1], after[1:])):
        asked = sum(map(len, trace.steps_of(np.stack(rows))))
        assert abs(asked / rows[0].size - 1.55) < 0.02


def test_commands(tmp_path, capsys):
    file = str(tmp_path / "trace.npz")
    model = str(tiny_directory("qwen3_moe"))
    trace.main(["record", "--model", model, "--prompt", "abc", "--max-tokens", "20", file])
    assert ", 3 layers, 4 of 16 experts" in capsys.readouterr().out
    trace.main(["replay", file, "--slots", "4", "48"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["slots"] for row in report["rows"]] == [4, 48]
    assert report["rows"][0]["lru"] <= report["rows"][1]["lru"]
    trace.main(["synthesize", "--tokens", "20", "--layers", "2", file])
    trace.main(["replay", file])
    assert "Belady" in capsys.readouterr().out
    trace.main(["synthesize", "--tokens", "20", "--layers", "2", "--drafts", "3", file])
    assert ": 4 sequences, 20 tokens, 2 layers, 8 of 128 experts" in capsys.readouterr().out
