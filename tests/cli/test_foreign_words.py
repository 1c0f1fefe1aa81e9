"""What users of mlx-lm, llama.cpp and Ollama type: each word works, or an error says what replaces it here."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from moeflux_mlx.cli.main import COMMANDS, main
from moeflux_mlx.foreign import COMMANDS as FOREIGN_COMMANDS
from moeflux_mlx.foreign import GENERATION, IN_COMMANDS, REMEDIES, RENAMED, remedy_of_command, remedy_of_option

MLX_LM = {  # command of mlx-lm -> ours
    **{"generate": "generate", "chat": "chat", "server": "serve", "convert": "convert", "cache_prompt": "generate"},
    **{"perplexity": "evaluate", "benchmark": "benchmark"},
}
# The first options of llama.cpp's `llama-server` and `llama-cli` (tools/server/README.md of ggml-org/llama.cpp), and
# those that people copy for models with experts.
LLAMA_CPP = (
    "-m -hf -hff -c --ctx-size -n --n-predict -ngl --n-gpu-layers -t --threads -b -ub -fa --flash-attn -np --parallel "
    "-ctk --cache-type-k -ctv --cache-type-v -ot -cmoe --cpu-moe -ncmoe --n-cpu-moe --no-mmap --mlock --lora -s "
    "--repeat-penalty --jinja -a --alias --api-key --host --port -md -cb --mmproj --chat-template-file -sys "
    "--grammar --json-schema -ts -sm -mg --rope-freq-base --override-kv --embedding --chat-template-kwargs "
    "--reasoning-budget --temp --top-k --top-p --min-p --verbose -v --no-warmup --hf-repo --metrics"
)
OLLAMA = "run pull show ps list ls rm cp stop create push signin serve"


def parser_of(command):
    return importlib.import_module(COMMANDS[command][0]).parser()


def options_of(command):
    return set(parser_of(command)._option_string_actions)


def said(words, capsys):
    """Returns the one line with which a command ends."""
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, (words, code, err)
    return err


@pytest.mark.parametrize("theirs", MLX_LM)
def test_every_option_of_mlx_lm_exists_or_is_replaced(theirs):
    found = importlib.util.find_spec("mlx_lm")
    if found is None:
        pytest.skip("mlx-lm is not installed")
    text = (Path(found.submodule_search_locations[0]) / f"{theirs}.py").read_text()
    words = {word for call in text.split("add_argument(")[1:] for word in re.findall(r'"(-[-\w]+)"', call[:90])}
    own = options_of(MLX_LM[theirs])
    assert len(words) > 5 and {word for word in words - own if not remedy_of_option(word, own)} == set()


@pytest.mark.parametrize("command", ["chat", "serve", "generate"])
def test_the_options_of_llama_cpp_exist_or_are_replaced(command, capsys):
    own = options_of(command)
    elsewhere = {"-sys", "--host", "--port", "-np", "--parallel"}  # as they are of some of our commands
    for word in LLAMA_CPP.split():
        if word not in own and word not in elsewhere:
            assert said([command, word, "1"], capsys).startswith(f"error: {word}: "), word


def test_the_commands_of_ollama_exist_or_are_replaced(capsys):
    for word in set(OLLAMA.split()) - set(COMMANDS):
        assert "; instead: " in said([word, "org/name"], capsys)
    assert "instead: moeflux chat --model org/name:Q4_K_M\n" in said(["run", "hf.co/org/name:Q4_K_M", "Hi"], capsys)


def test_all_that_is_wrong_is_said_at_once(capsys):
    err = said(["chat", "-hf", "org/name", "--ctx-size=4096", "-ngl", "99"], capsys)
    assert err.startswith("error: -hf: use --model; --ctx-size: use --context; -ngl: leave it out")


def test_the_library_and_the_commands_use_one_table(capsys):
    remedy = GENERATION["max_kv_size"].remedy
    assert remedy.endswith("load(kv_bits=8) makes them about half as large")
    assert remedy.replace("load(kv_bits=8)", "--kv-bits 8") in said(["generate", "--max-kv-size", "4"], capsys)


def test_the_value_that_mlx_lm_gives_verbose_is_explained(capsys):
    assert main(["generate", "--prompt", "Hi", "--verbose", "False"]) == 1
    assert capsys.readouterr().err.endswith("leave one of them out; --verbose takes no value here\n")


def test_a_name_of_ollama_hears_where_names_are(capsys):
    assert main(["chat", "--model", "qwen3:30b"]) == 1
    assert capsys.readouterr().err.endswith("or a repo id org/name, such as moeflux models lists\n")


def test_an_option_of_ours_that_has_another_meaning_elsewhere(capsys):
    assert "'x.gguf'; for -m of llama.cpp use --model;" in said(["generate", "-m", "x.gguf"], capsys)


def test_remedies_name_what_exists():
    texts = [*REMEDIES, *RENAMED, *FOREIGN_COMMANDS]
    options = set().union(*map(options_of, COMMANDS))
    assert {word for text in texts for word in re.findall(r"(?<!\w)--[a-z][-a-z]+", text)} <= options
    assert {word for text in texts for word in re.findall(r"moeflux (\w+)", text)} <= {*COMMANDS, "serve"}
    for text in FOREIGN_COMMANDS:
        if text.startswith("moeflux "):
            _, command, *words = text.split()
            parser_of(command).parse_args(words)
    assert all("{" not in text.format(**IN_COMMANDS) for text in REMEDIES if "enable_thinking" not in text)


@pytest.mark.parametrize("table", [REMEDIES, RENAMED, FOREIGN_COMMANDS])
def test_a_word_has_one_meaning(table):
    words = " ".join(table.values()).split()
    twice = {word for word in words if words.count(word) > 1}
    assert not twice if table is not RENAMED else twice <= {"m", "hf", "hfr", "hf_repo"}  # of --model and --hf-path
    assert not any(remedy_of_command([word]) for word in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_option_is_abbreviated(command, capsys):
    own = options_of(command)
    for option in sorted(own - {"--help"}):
        if option.startswith("--") and option[:-1] not in own:
            with pytest.raises(SystemExit):
                parser_of(command).parse_args([option[:-1], "1"])
            err = capsys.readouterr().err
            assert any(text in err for text in ("unrecognized", "required", "invalid choice", f"{option[:-1]}: "))
