"""A step of rows: each has the bits that it has alone, and every sequence can go back to any row of it."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from grids import drawn, examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_decode import CHOOSING, FAMILIES, make_resident
from tiny_models import tiny_directory, tiny_model, use_plain_operations

from metal import msl
from moeflux_mlx.caches.layer_cache import MOST_DRAFTS
from moeflux_mlx.errors import RequestError
from moeflux_mlx.mixers.delta import op as delta
from moeflux_mlx.mixers.grouped import op as attend
from moeflux_mlx.mixers.grouped.spec import GroupedQuery
from moeflux_mlx.mixers.latent import op as latent
from moeflux_mlx.mixers.latent.module import MLA
from moeflux_mlx.mixers.registry import make_caches
from moeflux_mlx.model import compiled
from moeflux_mlx.model.compiled import DecodeStep
from moeflux_mlx.model.step import SequenceRows
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import backend
from moeflux_mlx.ops.launch import Launch
from moeflux_mlx.ops.rows import StepRows

PROMPT = list(range(5, 25))


def full(family):
    return pytest.param(family, marks=pytest.mark.full)


class Alone:
    """Returns what each token of a text gives when the text is computed from the beginning, alone, token by token."""

    def __init__(self, model):
        self.model, self.known = model, {}

    def logits(self, prompt, text):
        """Returns the logits after the last token of `text`, which follows `prompt`."""
        if (prompt, text) not in self.known:
            cache = start(self.model, prompt)
            for i in range(len(text)):
                logits = self.model(mx.array([text[i : i + 1]]), cache)[0, -1]
                self.known[prompt, text[: i + 1]] = np.array(logits.astype(mx.float32))
        return self.known[prompt, text]


def start(model, prompt):
    cache = model.make_cache()
    if prompt:
        mx.eval(model(mx.array([prompt]), cache))
    return cache


def same(got, want):
    return np.array_equal(np.array(got.astype(mx.float32)), want)


def step(model, *sequences):
    return model.step([SequenceRows(cache, tokens) for cache, tokens in sequences])


def check(model, alone, prompts, plan):
    """Runs the steps of `plan`, [([tokens of each sequence], [rows kept of each])], and takes the other rows back."""
    caches, texts = [start(model, prompt) for prompt in prompts], [()] * len(prompts)
    for rows, kept in plan:
        taken = [i for i, tokens in enumerate(rows) if tokens]
        for i in taken:
            alone.logits(prompts[i], texts[i] + rows[i])  # of every row of the sequence, in one go
        made = step(model, *((caches[i], rows[i]) for i in taken))
        wanted = [(i, texts[i] + rows[i][: n + 1]) for i in taken for n in range(len(rows[i]))]
        assert made.logits.shape == (len(wanted), model.args.vocab_size)
        for got, (i, text) in zip(made.logits, wanted, strict=True):
            assert same(got, alone.logits(prompts[i], text))
        for place, i in enumerate(taken):
            count = min(kept[i], len(rows[i]))
            made.rewind(place, count)
            texts[i] += rows[i][:count]
            assert {layer.offset for layer in caches[i]} == {len(prompts[i]) + len(texts[i])}


@st.composite
def plans(draw):
    count = draw(st.integers(1, 4))
    prompts = draw(st.lists(st.sampled_from([(), (3, 5), tuple(PROMPT)]), min_size=count, max_size=count))
    tokens = st.lists(st.integers(0, 60), max_size=8 if count < 3 else 4).map(tuple)
    rows = st.lists(tokens, min_size=count, max_size=count).filter(any)
    kept = st.lists(st.integers(0, 8), min_size=count, max_size=count)
    return prompts, draw(st.lists(st.tuples(rows, kept), min_size=1, max_size=4))


# The numbers of rows of each sequence, including none and as many as allowed, and how many of them are kept.
STEPS = [
    ([(3,), (4, 5), (9,)], [1, 1, 0]),
    ([(9, 8, 7), (), (6, 5)], [2, 0, 2]),
    ([(), (1, 2, 3, 4, 5, 6, 7, 8), (2,)], [0, 3, 1]),
    ([(1,), (), ()], [1, 0, 0]),
]


def plain_model(family):
    """Returns a model of plain MLX operations."""
    with pytest.MonkeyPatch.context() as patch:
        use_plain_operations(patch)
        return load_model(tiny_directory(family), dtype=mx.float32)


@pytest.mark.parametrize(
    "family, kind",
    drawn(
        dict.fromkeys(
            [
                *FAMILIES,
                "mimo_v2_flash",
                "gemma4",
                "beam",
                "kimi_k3",
                "inkling",
                "inkling2",
                "inkling2_loop",
                "deepseek_v41",
                "llama4",
                "cohere2_moe",
                "longcat_flash",
                "mistral_large4",
                "axk2",
                "dots3_note",
                "muse_spark",
            ]
        ),
        ["native", "plain"],
    ),
)
def test_every_row_has_the_bits_that_it_has_alone(family, kind):
    if kind == "plain" and backend.has_kernels():
        pytest.skip("on a GPU the bits of MLX's own products depend on the number of rows")
    model = tiny_model(family, mx.float32) if kind == "native" else plain_model(family)
    alone = Alone(model)

    @given(plans())
    @example(([(), (3, 5), tuple(PROMPT)], STEPS))
    @settings(max_examples=examples(5))
    def rows_and_rewinds(plan):
        check(model, alone, *plan)

    rows_and_rewinds()


@pytest.mark.parametrize(
    "family",
    [*("qwen3_5_moe", "deepseek_v3", "gpt_oss"), *map(full, ["qwen3_moe", "qwen3_next", "gemma4", *CHOOSING])],
)
def test_rows_of_the_compiled_step_have_the_same_bits(monkeypatch, family):
    model = make_resident(monkeypatch, family)
    monkeypatch.setattr(compiled, "MOST_GRAPHS", 1)
    together, call = [], DecodeStep.__call__
    record = lambda self, *given, **named: together.append(len(given[1])) or call(self, *given, **named)  # noqa: E731
    monkeypatch.setattr(DecodeStep, "__call__", record)
    plan = [([(3,), (4, 5)], [1, 1]), ([(9, 8, 7), (6,)], [2, 0]), *[([(1,), (2,)], [0, 1])] * 3]
    plan += [([tuple(range(count)), ()], [kept, 0]) for count, kept in [(3, 1), (8, 8), (2, 0), (8, 5), (8, 7), (8, 8)]]
    check(model, Alone(model), [tuple(PROMPT), ()], plan)
    several = set() if family in CHOOSING else {3, 4}  # only some of a sequence's rows attend to all: refused
    assert {1, 2, 8} | several <= set(together)


@pytest.mark.usefixtures("both_builds")
@pytest.mark.usefixtures("plain_operations")
@msl.needed
@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("family", ["qwen3_5_moe", "deepseek_v3", *map(full, ["gpt_oss", "gemma4"])])
def test_rows_of_the_kernels_have_the_same_bits(family, small_products):
    """Metal's source is executed by the harness."""
    model = tiny_model(family, mx.float32)
    with msl.launching():
        check(model, Alone(model), [(), ()], [([(3, 4), (3,)], [1, 1]), ([(4,), ()], [1, 0])])


@pytest.mark.usefixtures("plain_operations")
@msl.needed
@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("family", [full(family) for family in ("deepseek_v32", *CHOOSING)])
def test_rows_that_choose_positions_have_the_same_bits(family, small_products):
    """The first sequence is behind the budget, the other before or about it."""
    model = tiny_model(family, mx.float32)
    with msl.launching():
        check(model, Alone(model), [tuple(PROMPT), tuple(PROMPT[:11])], [([(3, 4), (3,)], [1, 0])])


@pytest.mark.usefixtures("plain_operations")
@msl.needed
@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize(
    "family", ["qwen3_5_moe", "mistral4", *map(full, ["beam", "llama4", "deepseek_v3", "gpt_oss", "nemotron_h"])]
)
def test_rows_of_several_sequences_share_a_launch(monkeypatch, family):
    """The sequences have different lengths. In one step some have several rows, which share a launch of their own."""
    model, shared, of_rows = tiny_model(family, mx.float32), [], Launch.of_rows
    monkeypatch.setattr(Launch, "of_rows", lambda self, *given: shared.append(given[1]) or of_rows(self, *given))
    for module in (attend, delta, latent):
        module.plan.cache_clear()
    plan = [([(1,), (2, 3), (), ()], [1, 2, 0, 0]), ([(5,), (6,), (7,), (8,)], [1, 0, 1, 1])]
    with msl.launching():
        check(model, Alone(model), [()] * 4, plan)
    assert {2, 4} <= set(shared)


def test_rows_that_kernels_read_by_16_bytes_begin_at_multiples_of_them():
    """The gates of four heads beside queries and latents would put every second row elsewhere."""
    layers = [layer.self_attn for layer in tiny_model("bailing_hybrid").layers if hasattr(layer.self_attn, "g_proj")]
    inputs = [layer._inputs for layer in layers if isinstance(layer, MLA)]
    assert [stack.ends[-1] % 8 for stack in inputs if stack.stacked is None] == [4] * len(inputs) != []


def test_the_graphs_that_were_used_last_are_kept(monkeypatch):
    """Each graph is made once for its capacities, as long as there are not too many others."""
    monkeypatch.setattr(compiled, "MOST_GRAPHS", 2)
    made = []
    one = DecodeStep(lambda tokens, caches, *more: made.append(caches[0].capacity) or [tokens])
    layers = {length: make_caches(GroupedQuery(1, 1, 8, None))[0] for length in (10, 300, 600)}
    for length, layer in layers.items():
        layer.append(*(mx.zeros((1, 1, length, 8)) for _ in range(2)))
    for length in (10, 300, 10, 600, 10, 600, 300, 10):
        mx.eval(one(mx.array([[1]]), [[layers[length]]]))
    assert made == [256, 512, 768, 512, 256]


def test_every_order_of_sequences_has_the_same_graph():
    """Tokens and other arrays of the rows go to the caches of their sequence, and results come in the given order."""
    made, begun = [], []

    def run(tokens, caches, other):
        def absorbed(rows, own):
            entry = mx.broadcast_to(own[..., None, None].astype(mx.float32), (1, 1, 1, 8))
            return rows.cache.update_and_fetch(entry, entry)[0][:, 0, :1]

        made.append(tokens.shape)
        caches[0].each([tokens], absorbed)
        return [tokens + other]

    step, layers = DecodeStep(run), {length: make_caches(GroupedQuery(1, 1, 8, None))[0] for length in (10, 300, 600)}
    for length, layer in layers.items():
        layer.append(*(mx.zeros((1, 1, length, 8)) for _ in range(2)))
    for turn, order in enumerate(itertools.permutations(layers)):
        tokens, other = mx.array([[n + turn for n in order]]), mx.array([[7, 8, 9]])
        out = step(tokens, [[layers[n]] for n in order], other, begin=lambda row, _: begun.append(row))[0]
        assert mx.array_equal(out, tokens + other)
        for n in order:
            assert layers[n].offset == n + turn + 1 and layers[n].keys[0, 0, n + turn, 0].item() == n + turn
    assert made == [(1, 3)] and sorted(begun[:3]) == [0, 1, 2]


def test_the_graphs_of_a_text_with_drafts_are_kept_together():
    """The rows of one sequence are at every place among the entries of 4 and of 16 positions."""
    mixers = tiny_model("deepseek_v4", mx.float32).args.mixer_counts
    caches, ways = [cache for mixer in mixers for cache in make_caches(mixer)], set()
    for place in range(100):
        for cache in caches:
            cache.offset = place
        made = {(n, tuple(cache.traced(n) for cache in caches)) for n in range(1, MOST_DRAFTS + 2)}
        ways |= {kinds for n, kinds in made if None not in kinds}
    assert 32 <= len(ways) <= compiled.MOST_GRAPHS


def test_a_text_goes_on_with_a_prompt_after_rows_were_taken_back():
    model = tiny_model("qwen3_next", mx.float32)
    cache, want = start(model, PROMPT), start(model, PROMPT)
    step(model, (want, [1]))
    made = step(model, (cache, [1, 2, 3]))
    made.rewind(0, 3)
    made.rewind(0, 1)
    assert mx.array_equal(model(mx.array([PROMPT]), cache), model(mx.array([PROMPT]), want))
    with pytest.raises(RequestError, match="went on"):
        made.rewind(0, 0)


def test_a_step_states_the_memory_that_it_keeps_for_its_rows():
    model = tiny_model("qwen3_next", mx.float32)
    cache = start(model, PROMPT)
    before = sum(layer.nbytes for layer in cache)
    for rows in ([1, 2, 3, 4], [1, 2], [1]):
        made = step(model, (cache, rows))
        assert made.nbytes == len(rows) * sum(layer.kept_bytes(4) for layer in cache) > 0
        assert sum(layer.nbytes for layer in cache) == before
        made.rewind(0, 0)
        assert made.nbytes == 0


def test_impossible_steps_are_refused_before_anything_changes():
    model = tiny_model("qwen3_next", mx.float32)
    caches = [start(model, PROMPT) for _ in range(3)]
    vocab = model.args.vocab_size
    for sequences, message in [
        ([], "no sequences"),
        ([(caches[0], [])], "is empty"),
        ([(caches[0], [[1]])], "one row of token ids"),
        ([(caches[0], ["a"])], "one row of token ids"),
        ([(caches[0], [1] * 9)], "9 rows of one sequence in a step; at most 8"),
        ([(cache, [1] * 6) for cache in caches], "18 rows in a step; at most 16"),
        ([(caches[0], [1]), (caches[0], [2])], "a cache is in two sequences"),
        ([(caches[0], [1]), ([*caches[1][:-1], caches[0][-1]], [2])], "a cache is in two sequences"),
        ([(caches[0], [1]), (caches[1], [vocab])], f"token {vocab} is outside"),
        # On a GPU the ids in an array are not checked.
        *([] if backend.has_kernels() else [([(caches[1], mx.array([vocab]))], f"token {vocab} is outside")]),
        ([(caches[0], [1]), (caches[1][1:], [2])], "caches for"),
    ]:
        with pytest.raises(RequestError, match=message):
            step(model, *sequences)
        assert {layer.offset for cache in caches for layer in cache} == {len(PROMPT)}
    made = step(model, (caches[0], [1, 2]))
    for sequence, rows, message in [(1, 0, "sequence 1"), (-1, 0, "sequence -1"), (0, 3, "3 rows"), (0, -1, "-1 rows")]:
        with pytest.raises(RequestError, match=message):
            made.rewind(sequence, rows)
    made.rewind(0, 1)
    with pytest.raises(RequestError, match="cannot keep 2 rows of its last step; it can keep 0 to 1"):
        made.rewind(0, 2)


@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("reached", [0, 1, 4, 9, 11])
def test_a_step_that_fails_leaves_every_cache_as_it_was(monkeypatch, reached):
    """The step is interrupted before that many rows have passed their mixer, 4 in each layer."""
    model, mixed, each = tiny_model("qwen3_5_moe", mx.float32), [], StepRows.each
    caches = [start(model, PROMPT), start(model, [])]

    def failing(self, parts, compute, *more, **named):
        def counted(rows, *own):
            mixed.append(rows)
            if len(mixed) > reached:
                raise KeyboardInterrupt
            return compute(rows, *own)

        return each(self, parts, counted, *more, **named)

    monkeypatch.setattr(StepRows, "each", failing)
    with pytest.raises(KeyboardInterrupt):
        step(model, (caches[0], [1, 2]), (caches[1], [3, 4]))
    monkeypatch.undo()
    check_again = step(model, (caches[0], [1]), (caches[1], [3]))
    alone = Alone(model)
    for got, prompt, token in zip(check_again.logits, [tuple(PROMPT), ()], [1, 3], strict=True):
        assert same(got, alone.logits(prompt, (token,)))


def test_a_step_whose_text_was_written_anew_is_not_taken_back():
    """The new text has as many tokens, but different ones."""
    model = tiny_model("qwen3_moe", mx.float32)
    cache = start(model, PROMPT)
    made = step(model, (cache, [1, 2]))
    for layer in cache:
        layer.go_back(10, None)
    mx.eval(model(mx.array([list(range(30, 42))]), cache))
    assert {layer.offset for layer in cache} == {len(PROMPT) + 2}
    with pytest.raises(RequestError, match="went on"):
        made.rewind(0, 1)
    made = step(model, (cache, [1, 2]))
    mx.eval(model(mx.array([[3]]), cache))
    with pytest.raises(RequestError, match="went on"):
        made.rewind(0, 2)
