"""Digests of logits: two runs give the same ones, and a change of one weight changes each of them."""

import logit_digests
import pytest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_changed_weight_changes_every_digest(monkeypatch, dtype):
    load = logit_digests.load_model

    def changed(*given, **named):
        model = load(*given, **named)
        model.model.norm.weight = model.model.norm.weight * 1.01
        return model

    lines = list(logit_digests.lines_of("qwen3_next", dtype))
    assert [line.split()[:3] for line in lines] == [
        ["qwen3_next", dtype, way] for way in ("prompt", "tokens", "rows", "drafts")
    ]
    assert list(logit_digests.lines_of("qwen3_next", dtype)) == lines
    monkeypatch.setattr(logit_digests, "load_model", changed)
    assert not set(logit_digests.lines_of("qwen3_next", dtype)) & set(lines)
