"""What `plan` prints about several machines."""

import re

import pytest

from moeflux_mlx import plan


def planned(capsys, *arguments):
    assert plan.main(["--ram-gb", "64", "--disk-gb-per-s", "5", *arguments]) == 0
    return capsys.readouterr().out


def figure(text, start):
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    return float(re.search(r"([\d.]+)(?: s)?(?:  \(.*)?$", line)[1])


def test_a_streamed_model_gains(capsys):
    out = planned(capsys, "--variant", "qwen3.5-397b-a17b", "--ranks", "2", "--link-gb-per-s", "3")
    assert figure(out, "tokens/s, 2 machines") > 1.5 * figure(out, "tokens/s, 1 machine")
    assert figure(out, "8192 tokens, 2 machines") == pytest.approx(figure(out, "8192 tokens, 1 machine") / 2, rel=0.02)
    assert "faster for answers: 2 machines; for prompts: 2 machines" in out


def test_a_model_that_fits_gains_nothing(capsys):
    out = planned(capsys, "--variant", "qwen3-30b-a3b", "--ranks", "3")
    assert "one alone 100%" in out and "faster for answers: 1 machine; for prompts: 1 machine" in out


def test_a_slow_link_costs_prompts(capsys):
    fast, slow = (
        planned(capsys, "--variant", "qwen3.5-397b-a17b", "--ranks", "2", "--link-gb-per-s", rate)
        for rate in ("10", "0.1")
    )
    assert figure(slow, "8192 tokens, 2 machines") > 5 * figure(fast, "8192 tokens, 2 machines")
    assert "for prompts: 1 machine" in slow


@pytest.mark.parametrize("arguments", [("--ranks", "0"), ("--ranks", "65"), ("--ranks", "2", "--link-us", "0")])
def test_impossible_values(capsys, arguments):
    assert plan.main(["--variant", "qwen3-30b-a3b", *arguments]) == 1
    assert "must be" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--link-us", "300"), ("--ranks", "1", "--link-gb-per-s", "1")])
def test_a_link_needs_several_machines(capsys, arguments):
    assert plan.main(["--variant", "qwen3-30b-a3b", *arguments]) == 1
    assert "--link-us and --link-gb-per-s are for several machines; give --ranks N" in capsys.readouterr().err


def test_one_machine_gets_the_usual_plan(capsys):
    given = ("--variant", "qwen3-30b-a3b")
    assert planned(capsys, *given, "--ranks", "1") == planned(capsys, *given)
    drafts = (*given, "--draft", "lookup")
    assert planned(capsys, *drafts, "--ranks", "1") == planned(capsys, *drafts) != planned(capsys, *given)


@pytest.mark.parametrize(
    ("given", "idle"),
    [
        (("--ranks", "2", "--draft", "lookup"), "--draft has no effect with --ranks"),
        (("--shards-in", "/x"), "--shards-in has no effect with --variant"),
        (("--no-vision",), "--no-vision has no effect with --variant"),
        (("--chip", "M4 Max", "--ranks", "2"), "--ranks has no effect with --chip"),
    ],
)
def test_options_without_an_effect_are_refused(given, idle, capsys):
    assert plan.main(["--variant", "qwen3-30b-a3b", *given]) == 1
    assert capsys.readouterr().err == f"error: {idle}; leave one of them out\n"
