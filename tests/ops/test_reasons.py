"""Choosers that choose no kernel give a reason."""

import mlx.core as mx
import pytest

from moeflux_mlx.formats.record import Record
from moeflux_mlx.kinds import HeadBlocks, HyperConnections, Indexer, Rotation, Router
from moeflux_mlx.mixers.compressed import op as compressed
from moeflux_mlx.mixers.compressed.spec import Compressed
from moeflux_mlx.mixers.conv import op as conv
from moeflux_mlx.mixers.delta import op as delta
from moeflux_mlx.mixers.delta.spec import ChannelDecay, Delta
from moeflux_mlx.mixers.grouped import op as attend
from moeflux_mlx.mixers.latent import op as latent
from moeflux_mlx.mixers.mamba import op as mamba
from moeflux_mlx.mixers.mamba.spec import Mamba2
from moeflux_mlx.ops import combine, dequantize, experts, gated_streams, index, linear, ngrams, route, streams
from moeflux_mlx.ops.forms import Form
from moeflux_mlx.ops.launch import NO_KERNELS, Launch, Reason
from moeflux_mlx.ops.tiles import MAX_TOKENS
from moeflux_mlx.quant import EXPERTS, Quant

RECORD, NARROW = Record.make(256, 128), Record.make(256, 96, (Quant(4, 32),) * 3)
RULE = Router(16, 4)
GROUPED = Router(16, 4, groups=4, kept_groups=2)
CHANNELS = Delta(1, 2, 128, 128, 4, channel_decay=ChannelDecay(-5.0, 128))
MAMBA, WIDE = Mamba2(4, 64, 128, 2, 4), Mamba2(4, 64, 8192, 2, 4)
FORM = Form(EXPERTS, mx.bfloat16)
NORMS = mx.bfloat16, mx.bfloat16, mx.uint32


def window(width):
    """A layer that attends to a window, with heads of `width` values."""
    return Compressed(4, width, 64, Rotation(16, 1e4), 128, 2, 64)


def logits(target, tokens, hidden, rows=16):
    return route.plan_logits(target, (tokens, hidden), NORMS, (rows, hidden), FORM)


def gate_up(target, record, slots=2):
    return experts.plan_gate_up(target, (1, 256), mx.bfloat16, (4, record.stride // 4), (1, slots), record)


def down(slots):
    shapes, blob = ((1, slots, 128), (1, 256)), (4, RECORD.stride // 4)
    return experts.plan_down("metal", *shapes, blob, (1, slots), (mx.float32, mx.float32, None), RECORD)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (linear.refusal("ops", 1, (512, 512), EXPERTS, 0), NO_KERNELS),
        (linear.refusal("metal", 1, (512, 512), None, 0), "holds floats"),
        (linear.refusal("metal", 1, (2, 512, 512), EXPERTS, 0), "has 3 axes"),
        (linear.refusal("metal", 1, (512, 96), Quant(4, 32), 0), "in rows of 96 columns"),
        (linear.refusal("cuda", MAX_TOKENS + 1, (512, 512), EXPERTS, 0), f"more than {MAX_TOKENS} rows"),
        (linear.refusal("cuda", 8, (512, 512), EXPERTS, 10**6), "262,144 weights are fewer than 1,000,000"),
        (linear.plan("metal", (1, 64), mx.float32, (7, 8), (7, 1), FORM), "7 scales are fewer than 8"),
        (attend.refusal("ops", True, 64, 64), NO_KERNELS),
        (attend.refusal("metal", False, 64, 64), "several tokens"),
        (attend.refusal("metal", True, 320, 320), "head width 320 is above 256"),
        (attend.refusal("metal", True, 64, 48), "head width 48 is not a multiple of 32"),
        (attend.refusal("metal", True, 64, 96), "values of 96 are wider than keys of 64"),
        (latent.refusal("cuda", False, 512, 64), "several tokens"),
        (latent.refusal("cuda", True, 4096, 64), "latents of 4096 and keys of 64 values do not fit"),
        (latent.refusal("cuda", True, 512, 60), "512 and 60 are not multiples of 8"),
        (index.refusal("metal", False, Indexer(2, 64, 8)), "several tokens"),
        (index.refusal("metal", True, Indexer(2, 512, 8)), "index keys of 512 values are wider than 256"),
        (index.refusal("metal", True, Indexer(2, 60, 8)), "60 values are not a multiple of 8"),
        (index.refusal("cuda", True, HeadBlocks(96, Indexer(2, 64, 8))), "128 is not a multiple of blocks of 96"),
        (attend.native_refusal(False), "attend_step takes a single token"),
        (latent.native_refusal(9), "for more than 8 tokens"),
        (linear.native_refusal(Quant(4, 32), 96), "4 bits, group_size 32, mode affine in rows of 96 columns"),
        (experts.native_refusal(NARROW), "down_proj has rows of 96 columns in 4 bits"),
        (route.native_refusal(Router(16, 4, score="sigmoid")), "knows softmax, not sigmoid"),
        (route.native_refusal(GROUPED), "neither groups"),
        (delta.refusal("metal", 2, Delta(2, 2, 128, 128, 4)), "there are 2 sequences"),
        (delta.refusal("metal", 1, Delta(2, 2, 48, 128, 4)), "keys of 48 values"),
        (delta.refusal("cuda", 1, CHANNELS), "channels of 1 keys decay by themselves for 2 values"),
        (mamba.refusal("metal", 2, 1, MAMBA), "there are 2 sequences"),
        (mamba.refusal("metal", 1, 2, MAMBA), "several tokens"),
        (mamba.refusal("cuda", 1, 1, WIDE), "16448 values of a head do not fit"),
        (conv.refusal("ops", 1, 1), NO_KERNELS),
        (conv.refusal("metal", 2, 1), "there are 2 sequences"),
        (conv.refusal("cuda", 1, 2), "several tokens"),
        (compressed.refusal("metal", 2, window(64)), "several tokens"),
        (compressed.refusal("metal", 1, window(60)), "rows of 60, 60 and 0 values are not multiples of 8"),
        (compressed.refusal("cuda", 1, window(4096)), "heads of 4096 values do not fit"),
        (streams.refusal("metal", 1, HyperConnections(3, 20, 1e-6)), "there are 3 streams, not 2 or 4"),
        (gated_streams.refusal("metal", 2), "several tokens"),
        (gated_streams.form_refusal(None, 60), "rows of 60 columns"),
        (gated_streams.form_refusal(Quant(4, 64), 32), "do not read 4 bits"),
        (ngrams.refusal("cuda", 2), "several tokens"),
        (route.table_refusal("metal", Router(16, 4, table=9)), "does not know a softmax"),
        (route.table_refusal("metal", Router(64, 33, "sigmoid", table=9)), "33 experts, more than 32"),
        (route.refusal("ops", RULE), NO_KERNELS),
        (logits("metal", MAX_TOKENS + 1, 256), f"more than {MAX_TOKENS} rows"),
        (logits("cuda", route.MOST_ROWS["cuda"] + 1, 256), "more than 256 rows"),
        (logits("metal", 1, 96), "96 columns are not a multiple of 64"),
        (logits("metal", 1, 64, rows=4), "4 rows of 64 columns"),
        (gate_up("ops", RECORD), NO_KERNELS),
        (gate_up("cuda", RECORD, 33), "a token has 33 experts, more than 32"),
        (down(33), "a token has 33 experts, more than 32"),
        (gate_up("metal", NARROW), "down_proj has rows of 96 columns in 4 bits"),
        (combine.plan("ops", (1, 2), 64, (mx.float32, mx.float32, None)), NO_KERNELS),
        (dequantize.plan("cuda", (4, NARROW.stride // 4), (2,), mx.float32, NARROW, 1), "no kernel reads the records"),
    ],
)
def test_a_refusal_names_its_cause(reason, words):
    assert isinstance(reason, Reason) and words in reason


def test_an_accepted_shape_has_no_reason():
    assert linear.refusal("metal", 8, (512, 512), EXPERTS, 512 * 512) is None
    assert attend.refusal("cuda", True, 256, 128) is None and latent.refusal("metal", True, 512, 64) is None
    assert delta.refusal("cuda", 1, Delta(2, 2, 128, 128, 4)) is None and route.refusal("metal", RULE) is None
    assert isinstance(gate_up("metal", RECORD), Launch) and isinstance(logits("cuda", 256, 256), Launch)
