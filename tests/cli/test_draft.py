"""`--draft`: the same text, and a line on how many drafts were accepted."""

from test_generate import command
from tiny_heads import headed_directory
from tiny_models import tiny_directory

from moeflux_mlx.plan import main as plan


def test_lookup_gives_the_same_text_and_reports_its_drafts(capfd):
    prompt = ["--prompt", "ab ab ab ab ab", "--max-tokens", "40", "--verbose", "--model", tiny_directory("qwen3_5_moe")]
    code, text, err = command(capfd, *prompt)
    assert code == 0 and "drafts" not in err
    code, drafted, err = command(capfd, *prompt, "--draft", "lookup")
    assert code == 0 and drafted == text
    line = next(line for line in err.splitlines() if line.startswith("drafts: lookup, "))
    assert line.endswith(tuple("0123456789")) and "steps with 0 to 4 drafts: " in line


def test_a_head_is_planned_loaded_and_gives_the_same_text(capfd):
    model = ["--model", str(headed_directory("deepseek_v3"))]
    prompt = ["--prompt", "ab ab", "--max-tokens", "12", "--verbose", *model]
    code, text, _ = command(capfd, *prompt)
    code, drafted, err = command(capfd, *prompt, "--draft", "auto")
    assert code == 0 and drafted == text
    assert "drafts come from a head of " in err and "drafts: head, " in err
    assert plan([*model, "--draft", "head"]) == 0
    assert "\ndraft head " in capfd.readouterr().out
    assert plan(model) == 0
    assert "draft head" not in capfd.readouterr().out
    code, _, err = command(capfd, *prompt, "--draft", "nowhere")
    assert code != 0 and "nor a directory" in err
