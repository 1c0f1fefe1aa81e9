"""A run layer by layer: the logits of the whole model, from floats and from codes, and a run that was killed."""

import goldens
import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_directory, tiny_model, use_plain_operations

from moeflux_mlx.calibration.layers import LayerRun
from moeflux_mlx.calibration.weights import open_layers
from moeflux_mlx.errors import NotPackedError, RequestError
from moeflux_mlx.packing.located import Located

TOLERANCE = 2e-4  # maximal absolute error of logits with standard deviation 1, float32
pytestmark = pytest.mark.usefixtures("cpu_device")
DENSE = [family for family in goldens.FAMILIES if goldens.golden_path(family, "dense").exists()]


def logits_of(path, texts, folder, **options):
    """Returns the logits [T, V] of each text."""
    run = LayerRun(open_layers(Located(path)), texts, folder, mx.float32, **options)
    run.run()
    head = run.head()
    return [np.array(head(hidden)) for hidden in run.hidden()]


@pytest.mark.parametrize("family", DENSE)
def test_a_checkpoint_of_floats_gives_the_logits_of_hugging_face(tmp_path, family):
    tokens, wanted = goldens.golden(family, "dense")
    path = goldens.write_variant(tmp_path / "model", family, "hub")
    assert np.abs(logits_of(path, [tokens], tmp_path / "run")[0] - wanted).max() < TOLERANCE


def whole(family, texts, variant="hub"):
    model = tiny_model(family, mx.float32, variant)
    return [np.array(model(mx.array(text[None]))[0]) for text in texts]


def texts_of(family):
    tokens, _ = goldens.golden(family)
    return [tokens, tokens[5:30], tokens[:1]]


# Attention, recurrent mixers of three kinds, several streams of three kinds, sums of blocks, n-grams, a layer without
# experts, experts between two projections, biases of experts, chosen positions and blocks, norms that depend on the
# depth, a stream that is kept divided by a factor, experts beside attention, some whose output is added behind the next
# layer, and latents that layers share.
FAMILIES = [
    "qwen3_5_moe",
    "nemotron_h_latent",
    "lfm2_moe",
    "deepseek_v4",
    "qwen4_exp",
    "glm5_next",
    "gpt_oss",
    "glm_moe_dsa",
    "beam",
    "hy_v4",
    "kimi_k3",
    "granitemoehybrid",
    "cohere2_moe",
    "longcat_flash",
    "deepseek_v41",
    "mistral_large4",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_are_those_of_the_whole_model(tmp_path, family):
    texts = texts_of(family)
    made = logits_of(tiny_directory(family, "hub"), texts, tmp_path, rows_at_once=len(texts[0]) + 1)
    for own, wanted in zip(made, whole(family, texts), strict=True):
        assert own.shape == wanted.shape
        differing = (np.abs(own - wanted).max(axis=-1) >= TOLERANCE).mean()
        assert differing <= (
            0.5 if family == "deepseek_v41" else 0
        )  # which rounds: last bits may push it to other codes


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen4_exp"])
def test_an_mlx_checkpoint_and_plain_operations(tmp_path, monkeypatch, family):
    texts = texts_of(family)
    wanted = whole(family, texts, "mlx4")
    use_plain_operations(monkeypatch)
    checkpoint = goldens.write_variant(tmp_path / "model", family, "mlx4")
    for own, one in zip(logits_of(checkpoint, texts, tmp_path / "run"), wanted, strict=True):
        assert np.abs(own - one).max() < TOLERANCE


class Killed(BaseException):
    """Stands for a signal, which nothing catches."""


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("family", ["qwen4_exp", "glm_moe_dsa"])
def test_a_run_that_was_killed_ends_with_the_same_bytes(tmp_path, family):
    weights, texts = open_layers(Located(tiny_directory(family, "hub"))), texts_of(family)

    def made(folder):
        return LayerRun(weights, texts, folder, mx.float32, rows_at_once=40)

    made(tmp_path / "whole").run()
    reports = []

    def report(share):
        reports.append(share)
        if len(reports) == 9 * (len(stops) + 1):
            raise Killed

    stops = []
    while not stops or stops[-1] is not None:
        run = made(tmp_path / "killed")
        reports.clear()
        try:
            run.run(report)
            stops.append(None)
        except Killed:
            stops.append(run.finished)
            (tmp_path / "killed" / ".hidden-00001.safetensors.1.ab").write_bytes(b"what a signal leaves behind")
    assert len(set(stops)) > 2
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    kinds = [name.partition("-")[0] for name in contents(tmp_path / "whole")]
    assert len(kinds) == len(set(kinds)), "what the last layer needs alone stays"


@pytest.mark.parametrize(
    "change",
    [
        {"texts": [np.array([1, 2, 4])]},
        {"texts": [np.array([1, 2]), np.array([3])]},
        {"dtype": mx.bfloat16},
        {"rows_at_once": 9},
        {"name": "other"},
    ],
)
def test_a_folder_of_another_run_is_refused(tmp_path, change):
    weights = open_layers(Located(tiny_directory("qwen3_moe", "hub")))
    given = {"texts": [np.array([1, 2, 3])], "dtype": mx.float32}
    LayerRun(weights, folder=tmp_path, **given)
    key = {"name": "weights"}.get(next(iter(change)), next(iter(change)))
    with pytest.raises(RequestError, match=f"another run: its {key} differ"):
        LayerRun(weights, folder=tmp_path, **given | change)


def test_one_run_at_a_time(tmp_path):
    weights, texts = open_layers(Located(tiny_directory("qwen3_moe", "hub"))), [np.array([1, 2, 3])]
    other = LayerRun(weights, texts, tmp_path, mx.float32)
    messages = []

    def report(share):
        with pytest.raises(RequestError) as refused:
            other.run()
        messages.append(str(refused.value))

    LayerRun(weights, texts, tmp_path, mx.float32).run(report)
    assert messages and all("another process runs in" in message for message in messages)


@pytest.mark.parametrize(
    "texts, message",
    [
        ([], "there are no texts"),
        ([np.array([], int)], "a text has 0 tokens; the model takes 1 to"),
        ([np.zeros(1 << 20, int)], "a text has 1048576 tokens"),
        ([np.array([1 << 20])], "token 1048576 is outside the vocabulary"),
    ],
)
def test_impossible_texts(tmp_path, texts, message):
    with pytest.raises(RequestError, match=message):
        LayerRun(open_layers(Located(tiny_directory("qwen3_moe", "hub"))), texts, tmp_path, mx.float32)


def test_other_tools_records_are_converted_first(tmp_path):
    with pytest.raises(NotPackedError, match="another tool's packed experts; convert it first"):
        open_layers(Located(goldens.write_variant(tmp_path / "model", "qwen3_5_moe", "moeflux")))
