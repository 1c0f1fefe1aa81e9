"""Directories of one rank's experts: they hold what it owns and nothing else, and are never taken for a whole model."""

import goldens
import numpy as np
import pytest

from moeflux_mlx.convert import convert
from moeflux_mlx.errors import ConfigError, ModelFileError
from moeflux_mlx.formats.owners import Owners, RankShare
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.opening.weights import model_fingerprint, open_weights
from moeflux_mlx.packing.located import Located
from moeflux_mlx.plan import main as plan
from moeflux_mlx.state import fingerprint

FAMILIES = ("qwen3_moe", "deepseek_v3")
RANKS = 3


@pytest.fixture(scope="module", params=FAMILIES)
def directories(request, tmp_path_factory):
    """Returns a whole model, and one directory for each rank. Do not write into them."""
    source, folder = goldens.checkpoint_dir(request.param), tmp_path_factory.mktemp("held")
    convert(source, folder / "whole")
    for rank in range(RANKS):
        convert(source, folder / str(rank), ranks=RANKS, rank=rank, verify=True)
    return folder


def records(path):
    """Returns the records [E, stride] of each layer."""
    experts = open_weights(Located(path)).experts
    return {
        layer: np.fromfile(file, np.uint8).reshape(experts.layout.num_experts, -1)
        for layer, file in experts.paths.items()
    }


def test_a_rank_has_its_experts_and_only_samples_of_the_others(directories, monkeypatch):
    whole, owners = records(directories / "whole"), Owners((1,) * RANKS)
    blank = 0
    for rank in range(RANKS):
        for layer, stored in records(directories / str(rank)).items():
            own = owners.experts(layer, rank, len(stored))
            assert np.array_equal(stored[own], whole[layer][own]) and stored[own].any(axis=1).all()
            others = [expert for expert in range(len(stored)) if expert not in own]
            at = np.concatenate(
                [
                    np.arange(o, o + fingerprint.SAMPLE_BYTES)
                    for o in fingerprint.offsets_of(stored.size, fingerprint.EXPERT_SAMPLES)
                ]
            )
            sampled = np.zeros(stored.size, bool)
            sampled[at] = True
            sampled = sampled.reshape(stored.shape)[others]
            assert np.array_equal(stored[others], np.where(sampled, whole[layer][others], 0))
            blank += int((~sampled).sum())
    assert blank > 0


def test_all_have_one_fingerprint_and_take_less_of_the_disk(directories):
    paths = [directories / "whole", *(directories / str(rank) for rank in range(RANKS))]
    assert len({model_fingerprint(path, load_model(paths[0]).activation_dtype) for path in paths}) == 1
    taken = [sum(file.stat().st_blocks for file in (path / "packed_experts").glob("*.bin")) for path in paths]
    sizes = [sum(file.stat().st_size for file in (path / "packed_experts").glob("*.bin")) for path in paths]
    assert max(taken[1:]) < taken[0] and len(set(sizes)) == 1


def test_other_ranks_and_single_processes_refuse_it(directories):
    with pytest.raises(
        ModelFileError, match="holds the experts of rank 1 of 3 only, not expert . of layer .*needs all"
    ) as failure:
        load_model(directories / "1")
    assert "\n" not in str(failure.value)
    weights = open_weights(Located(directories / "1"))
    weights.check_held(RankShare(Owners((1, 1, 1)), 1))
    for wanted in (RankShare(Owners((1, 1, 1)), 0), RankShare(Owners((1, 1)), 1), RankShare(Owners((1, 2, 1)), 1)):
        with pytest.raises(ModelFileError, match=f"this is rank {wanted.rank} of {len(wanted.owners.shares)}"):
            weights.check_held(wanted)
    open_weights(Located(directories / "whole")).check_held(None)


def test_a_plan_of_one_rank_s_directory_is_one_for_all_ranks(directories, capsys):
    assert plan(["--model", str(directories / "1")]) == 1
    assert "holds the experts of rank 1 of 3 only" in capsys.readouterr().err
    assert plan(["--model", str(directories / "1"), "--ranks", "3"]) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ranks": 2}, "--ranks is 2 and --rank is missing"),
        ({"rank": 0}, "--ranks is missing and --rank is 0"),
        ({"ranks": 2, "rank": 2}, "--ranks is 2 and --rank is 2"),
        ({"ranks": 1, "rank": 0}, "--ranks is 1 and --rank is 0"),
    ],
)
def test_impossible_ranks(tmp_path, options, said):
    with pytest.raises(ConfigError, match=f"{said}; give 2 to 64 ranks"):
        convert(goldens.checkpoint_dir("qwen3_moe"), tmp_path / "out", **options)


def test_a_checkpoint_that_is_deleted_or_downloaded_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="a directory that stays"):
        convert(goldens.checkpoint_dir("qwen3_moe"), tmp_path / "out", ranks=2, rank=0, delete_source=True)
    with pytest.raises(ConfigError, match="a directory that stays"):
        convert("org/name", tmp_path / "out", ranks=2, rank=0)


def test_a_directory_of_another_rank_is_not_continued(directories, tmp_path):
    source = goldens.checkpoint_dir("qwen3_moe")
    convert(source, tmp_path / "out", ranks=2, rank=0)
    with pytest.raises(ModelFileError, match="with other options"):
        convert(source, tmp_path / "out", ranks=2, rank=1)
