"""Drafts that follow a trace: the text does not depend on the depth, and wrong rows request experts of their own."""

import argparse

import bench_drafts as bench
import numpy as np
import pytest
import routing_trace
from tiny_models import tiny_directory

from moeflux_mlx import load_model

PROMPT, TOKENS = [1, 2, 3], 24


@pytest.fixture
def traced(drafts_are_put_back):
    """A streamed model whose rows follow a trace of three sequences."""
    made = routing_trace.synthesize_drafts((3, 40, 3, 4), 16, 0.4, 0.0, np.random.default_rng(0))
    model = load_model(str(tiny_directory("qwen3_moe")), expert_io="pread", expert_cache_bytes=1)  # the smallest pool
    yield bench.TracedText(model, made, PROMPT), model
    model.experts.close()


def measured(traced, model):
    options = argparse.Namespace(tokens=TOKENS, right=0.6, rounds=1, depths=["0", "2"], draft="lookup")
    return bench.measure(model, [PROMPT], options, traced)


def test_the_text_is_the_same_at_every_depth(traced):
    rows = measured(*traced)
    assert 0 < rows["2"]["taken"] < rows["2"]["checked"]
    assert rows["0"]["union"] == 1 < rows["2"]["union"] < 3
    assert rows["0"]["allowed"] == 1 > rows["2"]["allowed"] == rows["0"]["missed"] / rows["2"]["missed"]
    assert rows["2"]["reached"] == rows["2"]["ratio"] / rows["2"]["allowed"]


def test_nothing_is_allowed_if_nothing_is_missed():
    rows = {"0": {"missed": 0.0, "ratio": 1.0}, "1": {"missed": 3.0, "ratio": 0.9}}
    bench.add_allowed(rows)
    assert "allowed" not in rows["0"] and "reached" not in rows["1"]


def test_a_row_of_the_text_with_experts_of_another_changes_it(traced, monkeypatch):
    monkeypatch.setattr(bench, "wrong_rows", lambda tokens, text: np.arange(len(tokens)))
    with pytest.raises(AssertionError, match="another text at depth 2"):
        measured(*traced)


def test_rows_are_wrong_from_the_first_wrong_token_on():
    assert bench.wrong_rows([5, 6, 7, 8], [5, 6, 7, 8]).tolist() == [0, 0, 0, 0]
    assert bench.wrong_rows([5, 9, 7, 8], [5, 6, 7, 8]).tolist() == [0, 1, 2, 3]
    assert bench.wrong_rows([5, 6, 7], [5]).tolist() == [0, 0, 0], "nothing is known there"
