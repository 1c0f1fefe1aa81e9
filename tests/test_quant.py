"""How matrices are stored: every spelling of a path finds its entry, and shapes must agree with config.json."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux_mlx.errors import ConfigError, ModelFileError
from moeflux_mlx.quant import (
    AFFINE_BITS,
    AFFINE_GROUPS,
    MODES,
    Quant,
    entries,
    of_packed,
    of_shapes,
    parse,
)

PATH = "model.layers.3.mlp.switch_mlp.down_proj"
SPELLINGS = (
    PATH,
    f"language_model.{PATH}",
    "model.language_model.layers.3.mlp.switch_mlp.down_proj",
    "layers.3.mlp.switch_mlp.down_proj",
)


@pytest.mark.parametrize("asked", SPELLINGS)
@pytest.mark.parametrize("written", SPELLINGS)
def test_every_spelling_of_a_path_is_the_same(written, asked):
    config = {"quantization": {"bits": 3, "group_size": 64, written: {"bits": 6, "group_size": 32}}}
    quantization = of_packed(config)
    assert quantization.of(asked) == Quant(6, 32)
    assert quantization.of(asked.replace("3", "13")) == Quant(3, 64)
    config["quantization"][written] = False
    assert of_packed(config).of(asked) is None


def test_two_spellings_that_differ_are_refused():
    config = {"quantization": {"bits": 4, SPELLINGS[0]: {"bits": 6}, SPELLINGS[1]: {"bits": 5}}}
    with pytest.raises(ConfigError, match="6 bits.* under another spelling"):
        of_packed(config)
    config["quantization"][SPELLINGS[1]] = {"bits": 6}
    assert of_packed(config).of(PATH) == Quant(6, 64)


@pytest.mark.parametrize(
    ("entry", "wanted"),
    [
        ({"bits": 3}, Quant(3, 64)),
        ({"group_size": 32}, Quant(4, 32)),
        ({"mode": "mxfp4"}, Quant(4, 32, "mxfp4")),
        ({"mode": None, "bits": None, "group_size": 128}, Quant(4, 128)),
        ({"mode": "nvfp4", "global_scale": None}, Quant(4, 16, "nvfp4")),
        ({"mode": "nvfp4", "global_scale": True}, Quant(4, 16, "nvfp4", has_global_scale=True)),
    ],
)
def test_what_an_entry_leaves_out_is_the_modes_default(entry, wanted):
    """The rest of the file does not change the default."""
    quants = entries({"quantization": {"bits": 8, "group_size": 32, "m": entry, "on": True}})
    assert quants == {"": Quant(8, 32), "m": wanted}


@pytest.mark.parametrize("quant", [Quant(3, 64), Quant(4, 32, "mxfp4"), Quant(4, 16, "nvfp4", has_global_scale=True)])
def test_an_entry_says_what_it_was_made_from(quant):
    assert parse("m", quant.entry()) == quant


@pytest.mark.parametrize(
    "entry",
    [{"global_scale": True}, {"mode": "mxfp4", "global_scale": True}, {"mode": "nvfp4", "global_scale": 1.0}],
)
def test_a_global_scale_without_a_form_is_refused(entry):
    with pytest.raises(ConfigError, match="quantization of m: .*, global_scale .* is not known"):
        parse("m", entry)


@pytest.mark.parametrize("where", [{}, {"m": 1}])
def test_a_form_that_is_not_known_is_named(where):
    form = {"mode": "mxfp8", "group_size": 64, "bits": 8}
    config = {"quantization": {"bits": 4, "m": form} if where else form}
    with pytest.raises(ConfigError) as refused:
        of_packed(config)
    text = str(refused.value)
    assert f"of {'m' if where else 'the model'}: 8 bits, group_size 64, mode 'mxfp8' is not known" in text[:200]
    assert "affine 1, 2" in text[:200]


def test_known_forms():
    forms = [Quant(bits, group) for bits in AFFINE_BITS for group in AFFINE_GROUPS]
    forms += [Quant(mode.bits, mode.group_size, name) for name, mode in MODES.items()]
    forms.append(Quant(4, 16, "nvfp4", has_global_scale=True))
    assert all(form.is_known for form in forms) and len(forms) == 21 + 5 + 10 + 11
    for other in (
        Quant(7, 64),
        Quant(4, 16),
        Quant(4, 64, "mxfp4"),
        Quant(4, 32, "mxfp4", True),
        Quant(8, 16, "mxfp8"),
    ):
        assert not other.is_known


forms = st.builds(Quant, st.sampled_from(AFFINE_BITS), st.sampled_from(AFFINE_GROUPS)) | st.just(Quant(4, 32, "mxfp4"))


@given(form=forms, stated=forms | st.none(), groups=st.integers(1, 20), off=st.integers(-2, 2), more=st.integers(-1, 1))
def test_shapes_and_configuration_must_agree(form, stated, groups, off, more):
    columns = 128 * groups
    words, count = form.words(columns) + off, form.groups(columns) + more
    if stated and not off and not more and (form.bits, form.group_size) == (stated.bits, stated.group_size):
        assert of_shapes("m", columns, words, count, stated) == stated  # shapes do not show the mode
        return
    with pytest.raises(
        ModelFileError, match=rf"tensor m\.weight has .* by its shapes.*says {stated or 'not quantised'}$"
    ):
        of_shapes("m", columns, words, count, stated)


@given(columns=st.integers(0, 300), words=st.integers(0, 300), groups=st.integers(0, 40), stated=forms)
def test_any_shapes_are_a_form_or_a_model_file_error(columns, words, groups, stated):
    try:
        quant = of_shapes("m", columns, words, groups, stated)
    except ModelFileError:
        return
    assert quant == stated and quant.words(columns) == words and quant.groups(columns) == groups
