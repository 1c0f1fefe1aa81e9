"""The command and the generation loop on tiny models: text, statistics, and one-line errors for bad input."""

import argparse
import contextlib
import errno
import io
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import goldens
import mlx.core as mx
import numpy as np
import pytest
from small_hub import SmallHub, connected
from tiny_models import child_environment, tiny_directory, tiny_model

from moeflux_mlx import load, make_logits_processors, make_prompt_cache, make_sampler, stream_generate
from moeflux_mlx.cli.options import NOT_GIVEN
from moeflux_mlx.cli.run import execute
from moeflux_mlx.driving.generation import generate as library_generate
from moeflux_mlx.driving.generation import generate_step
from moeflux_mlx.errors import ModelFileError, NotPackedError, RequestError
from moeflux_mlx.files import read_json
from moeflux_mlx.generate.__main__ import main, parser
from moeflux_mlx.model.decoder import Model

FAMILIES = goldens.families()
PROMPT = list(range(10, 31))


def tokens_of(model, **kwargs):
    return [token for token, _ in generate_step(PROMPT, model, max_tokens=12, **kwargs)]


@pytest.fixture(scope="module")
def model_dir():
    return tiny_directory("qwen3_5_moe")


@pytest.fixture
def copy_dir(model_dir, tmp_path):
    """Returns a copy of a model directory that a test may damage."""
    return shutil.copytree(model_dir, tmp_path / "model")


def command(capfd, *arguments):
    """Returns a function that runs the command in this process and gives (exit code, stdout, stderr)."""
    code = main([str(a) for a in arguments])
    captured = capfd.readouterr()
    return code, captured.out, captured.err


def fails(capfd, *arguments):
    """Returns the one line that the command prints when it refuses."""
    code, out, err = command(capfd, *arguments)
    assert code == 1 and out == ""
    lines = [line for line in err.splitlines() if not line.startswith("expert I/O")]
    assert len(lines) == 1 and lines[0].startswith("error: ") and "Traceback" not in err
    return lines[0]


# ---- the loop


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_step_does_not_change_the_tokens(family):
    model = tiny_model(family, mx.float32)
    assert tokens_of(model) == tokens_of(model, prefill_step_size=5) == tokens_of(model, span=1)
    assert tokens_of(model) == tokens_of(model, span=7, prefill_step_size=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_generates_the_same_tokens(family):
    """Runs our model and tokenizer, unchanged, in mlx-lm's own loop."""
    mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm needs Python 3.11")
    model, tokenizer = load(tiny_directory(family), dtype=mx.float32)
    ours = [r.token for r in stream_generate(model, tokenizer, PROMPT, max_tokens=12)]
    theirs = [r.token for r in mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=12)]
    assert ours == theirs[: len(ours)] and len(ours) >= 1


def test_a_prompt_cache_continues(model_dir):
    model = tiny_model("qwen3_5_moe", mx.float32)
    whole = tokens_of(model)
    cache = make_prompt_cache(model)
    first = next(generate_step(PROMPT[:9], model, max_tokens=1, prompt_cache=cache))
    assert isinstance(first[0], int)
    rest = [token for token, _ in generate_step(PROMPT[9:], model, max_tokens=12, prompt_cache=cache)]
    assert rest == whole


def test_statistics_of_responses_add_up(model_dir):
    model, tokenizer = load(model_dir, dtype=mx.float32)
    responses = list(stream_generate(model, tokenizer, "Once upon", max_tokens=9))
    last = responses[-1]
    assert last.finish_reason in ("length", "stop") and last.generation_tokens == len(responses)
    assert all(r.finish_reason is None for r in responses[:-1])
    assert last.prompt_tokens == len(tokenizer.encode("Once upon"))
    assert last.logprobs.shape == (model.args.vocab_size,)
    text = "".join(r.text for r in responses)
    assert text == library_generate(model, tokenizer, "Once upon", max_tokens=9)
    kept = [r.token for r in responses if r.token not in tokenizer.eos_token_ids]
    assert text == tokenizer.decode(kept)


def test_stops_at_end_of_text(model_dir):
    model, tokenizer = load(model_dir, dtype=mx.float32)
    end = min(tokenizer.eos_token_ids)

    def sampler(logprobs):
        return mx.array([end])

    responses = list(stream_generate(model, tokenizer, "a", max_tokens=5, sampler=sampler))
    assert [(r.token, r.finish_reason, r.text) for r in responses] == [(end, "stop", "")]


def test_same_seed_same_text(model_dir):
    model = tiny_model("qwen3_5_moe", mx.float32)

    def sampled(seed):
        return tokens_of(model, sampler=make_sampler(temp=1.0, key=mx.random.key(seed)))

    assert sampled(1) == sampled(1) != sampled(2)


@pytest.mark.parametrize(
    "prompt, kwargs, words",
    [
        ([], {}, "prompt is empty"),
        ([1, 99999], {}, "99999 is outside the vocabulary"),
        ([-1], {}, "-1 is outside"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"max_tokens": -2}, "max_tokens is -2"),
        ([1], {"max_tokens": 1.5}, "max_tokens is 1.5"),
        ([1], {"max_tokens": None}, "max_tokens is None"),
        ([1], {"prefill_step_size": 0}, "prefill_step_size is 0"),
    ],
)
def test_impossible_requests(prompt, kwargs, words):
    with pytest.raises(RequestError, match=words):
        next(generate_step(prompt, tiny_model("qwen3_moe", mx.float32), **kwargs))


def test_not_a_number_in_expert_scales_is_reported(copy_dir):
    for file in (copy_dir / "packed_experts").glob("layer_*.bin"):
        file.write_bytes(b"\xff" * file.stat().st_size)  # bfloat16 0xffff is NaN
    model, _ = load(copy_dir, dtype=mx.float32)
    with pytest.raises(ModelFileError, match="NaN"):
        next(generate_step(PROMPT, model))


@pytest.mark.parametrize(
    "tokens, words",
    [
        ([[1, 2]], "tokens are list"),
        (mx.array([1, 2]), r"uint32|int32.*\(2,\); give an mx.array of integers \[B, L\]"),
        (mx.array([[1.5]]), "float32"),
        (mx.zeros((1, 0), mx.int32), "at least one"),
        (mx.array([[1, 256]]), "token 256 is outside the vocabulary of 256"),
        (mx.array([[-1, 3]]), "token -1 is outside"),
    ],
)
def test_tokens_that_a_model_does_not_have(tokens, words):
    model = tiny_model("qwen3_moe", mx.float32)
    cache = model.make_cache()
    with pytest.raises(RequestError, match=words):
        model(tokens, cache)
    assert all(layer.empty() for layer in cache)


@pytest.mark.parametrize("cache", [[], 5, {}])
def test_caches_that_no_model_made_are_refused(cache):
    with pytest.raises(RequestError, match=r"for \d+ layers; use model.make_cache"):
        next(generate_step([1], tiny_model("qwen3_next", mx.float32), prompt_cache=cache))


def test_another_models_caches_are_refused():
    with pytest.raises(RequestError, match=r"3 caches for \d+ layers; use model.make_cache"):
        tiny_model("qwen3_next", mx.float32)(mx.array([[1]]), tiny_model("qwen3_moe", mx.float32).make_cache()[:3])


@pytest.mark.parametrize("prompt", [None, 7, mx.array([[1, 2]]), mx.array(3), {"a": 1}, True])
def test_prompts_of_other_types(model_dir, prompt):
    model, tokenizer = load(model_dir, dtype=mx.float32)
    for call in (stream_generate, library_generate):
        with pytest.raises(RequestError, match="prompt"):
            list(call(model, tokenizer, prompt))


# ---- the command


def test_command_writes_text_and_statistics(capfd, model_dir):
    code, out, err = command(capfd, "--model", model_dir, "--prompt", "hi", "--max-tokens", "6", "--verbose")
    assert code == 0 and out.endswith("\n")
    for words in (
        "expert I/O: mmap (auto)",
        "threshold",
        "prompt tokens",
        "prompts: spans of up to",
        "generation: 6 tokens",
        "peak memory",
        "cut after 6 tokens; --max-tokens -1",
        "expert I/O: mmap\n",
    ):
        assert words in err, words
    peak, arrays = map(
        float, re.search(r"peak memory: ([\d.]+) GB with pages of mapped files, ([\d.]+) GB of it MLX's", err).groups()
    )
    assert peak > arrays > 0 and peak > 0.03
    assert "\r" not in err  # progress is shown only on terminals


def test_the_prompt_is_words_or_an_option(capfd, model_dir):
    options = ["--model", model_dir, "-m", "2"]
    assert command(capfd, "hi", "there", *options)[1] == command(capfd, *options, "--prompt", "hi there")[1]
    assert "prompt is empty" in fails(capfd, *options, "")
    assert "the prompt is given twice, as 'hi' and with --prompt" in fails(capfd, *options, "hi", "-p", "there")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--promt", "hi"], "error: unrecognized arguments: --promt; did you mean --prompt?"),
        (["--maxtokens=5"], "error: unrecognized arguments: --maxtokens=5; did you mean --max-tokens?"),
        (["--max-tokens", "x"], "error: argument --max-tokens/-m: invalid int value: 'x'; "),
        (["--zzzzzzzzzz"], "error: unrecognized arguments: --zzzzzzzzzz; "),
    ],
)
def test_a_wrong_option_is_one_line(capfd, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    said = capfd.readouterr().err
    assert stopped.value.code == 2 and said.startswith(message) and said.count("\n") == 1 and "--help lists" in said


@pytest.fixture
def stdin_is(monkeypatch):
    """Returns a function that gives the command these bytes."""
    return lambda data: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_command_reads_stdin_and_ignores_the_template(capfd, model_dir, stdin_is):
    stdin_is("naïve".encode())
    code, _, err = command(capfd, "--model", model_dir, "-p", "-", "-m", "2", "--ignore-chat-template", "--verbose")
    assert code == 0 and f"prompt: {len('naïve'.encode())} tokens" in err


def test_expert_io_option_and_environment(capfd, model_dir, monkeypatch):
    monkeypatch.setenv("MOEFLUX_EXPERT_IO", "pread")
    assert "pread (forced)" in command(capfd, "--model", model_dir, "-p", "a", "-m", "1")[2]
    assert "mmap (forced)" in command(capfd, "--model", model_dir, "-p", "a", "-m", "1", "--expert-io", "mmap")[2]
    monkeypatch.setenv("MOEFLUX_EXPERT_IO", "turbo")
    err = command(capfd, "--model", model_dir, "-p", "a", "-m", "1")[2]
    assert "warning: MOEFLUX_EXPERT_IO='turbo'" in err and "(auto)" in err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--prompt", "  "], "prompt is empty"),
        (["--prompt", "abc", "--max-tokens", "0"], "max_tokens is 0"),
        (["--temp", "-1"], "temp"),
        (["--temp", "nan"], "temp"),
        (["--top-p", "1.5"], "top_p"),
        (["--min-p", "-0.1"], "min_p"),
        (["--top-k", "-3"], "top_k"),
        (["--seed", "-1"], "--seed -1"),
        (["--repetition-penalty", "-1"], "penalty"),
        (["--repetition-penalty", "2", "--repetition-context-size", "0"], "repetition_context_size is 0"),
        (["--xtc-probability", "2"], "xtc_probability is 2.0"),
        (["--xtc-threshold", "0.6"], "xtc_threshold is 0.6"),
        (["--prefill-step-size", "0"], "prefill_step_size is 0"),
        (["--chat-template-config", "{"], "not JSON"),
        (["--chat-template-config", "[]"], "expected an object"),
        (["--chat-template-config", '{"tokenize": false}'], "cannot set tokenize"),
        (["--rank-share", "0"], "--rank-share is for one of several ranks"),
        (["--rank-seconds", "30"], "--rank-seconds is for one of several ranks"),
        (["--share-routing"], "--share-routing is for one of several ranks"),
        (["--set", "tiles=no-such"], "tiles 'no-such' is not one of auto, code"),
        (["--prompt-cache-dir", ""], "a path is empty"),
        (["--model", ""], "a path is empty"),
        (["--model", "/nosuch/nowhere"], "does not exist"),
        (["--model", __file__], "is not a directory, nor a GGUF file"),
    ],
)
def test_bad_values(capfd, model_dir, arguments, words):
    assert words in fails(capfd, "--model", model_dir, *arguments)


def test_prompt_that_is_not_utf8(capfd, model_dir, stdin_is):
    stdin_is(b"ab\xff")
    assert "not UTF-8: byte 2" in fails(capfd, "--model", model_dir, "--prompt", "-")


def test_checkpoint_that_is_not_packed(capfd, copy_dir):
    shutil.rmtree(copy_dir / "packed_experts")
    line = fails(capfd, "--model", copy_dir)
    assert f"{copy_dir} holds an unfinished conversion" in line
    (copy_dir / "convert_state.json").unlink()
    line = fails(capfd, "--model", copy_dir)
    assert f"python -m moeflux_mlx.convert --hf-path {copy_dir} --mlx-path" in line and "GB" in line
    assert "requantize" not in line


@pytest.mark.parametrize(
    "quantization",
    [
        {"group_size": 64, "bits": 4, "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8}},
        {"group_size": None, "bits": 4, "mode": "nvfp4"},
        {"group_size": 64, "bits": 4, "model.layers.1.mlp.switch_mlp.down_proj": {"mode": "mxfp8"}},
        None,
    ],
)
def test_the_command_for_a_checkpoint_can_be_run(copy_dir, quantization, capfd):
    """The command is valid for any name of the directory."""
    path = copy_dir.rename(copy_dir.with_name("my model's; $HOME"))
    shutil.rmtree(path / "packed_experts")
    (path / "convert_state.json").unlink()
    edit_json(path / "config.json", quantization=quantization)
    command = re.search(r"run: (.*?)  \(", fails(capfd, "--model", path))[1]
    assert shlex.split(command)[:5] == ["python", "-m", "moeflux_mlx.convert", "--hf-path", str(path)]
    assert "--requantize" not in command


def test_the_target_has_the_checkpoints_name(copy_dir, monkeypatch, capfd):
    shutil.rmtree(copy_dir / "packed_experts")
    (copy_dir / "convert_state.json").unlink()
    (copy_dir / "below").mkdir()
    for folder, name in ((copy_dir, "."), (copy_dir / "below", ".."), (copy_dir.parent, "model/")):
        monkeypatch.chdir(folder)
        assert f"--hf-path {name.rstrip('/')} --mlx-path model-moeflux" in fails(capfd, "--model", name)


def edit_json(file, **change):
    value = json.loads(file.read_text())
    file.write_text(json.dumps({**value, **change}))


def of_layer(change):
    """Changes the bytes of a layer's file."""

    def damage(path):
        file = path / "packed_experts" / "layer_01.bin"
        file.write_bytes(change(file.read_bytes()))

    return damage


def of_resident(name, change):
    """Changes a resident tensor, or leaves it out."""

    def damage(path):
        (file,) = path.glob("resident*.safetensors")
        tensors = mx.load(str(file))
        mx.eval(tensors)
        key = next(key for key in sorted(tensors) if key.endswith(name))
        tensors[key] = change(tensors[key])
        mx.save_safetensors(str(file), {key: value for key, value in tensors.items() if value is not None})

    return damage


def of_json(file, **change):
    return lambda path: edit_json(path / file, **change)


def of_template(text):
    return lambda path: (path / "chat_template.jinja").write_text(text)


def one_tensor_more(path):
    mx.save_safetensors(str(path / "resident-2.safetensors"), {"model.extra": mx.zeros((1,))})


def truncate_resident(path):
    (file,) = path.glob("resident*.safetensors")
    os.truncate(file, file.stat().st_size // 2)


DAMAGES = [  # what happens to a model's directory, and words of the line that says so
    (of_layer(lambda data: data[:-1]), "layer_01.bin"),
    (of_layer(lambda data: data + bytes(1)), "layer_01.bin"),
    (lambda path: (path / "packed_experts" / "layer_01.bin").unlink(), "layer_01.bin"),
    (of_json("packed_experts/layout.json", num_experts=3), "num_experts is 3"),
    (of_json("config.json", model_type="llama", text_config=None), "model_type 'llama'"),
    (of_json("config.json", text_config={}), "is missing"),
    (of_resident("o_proj.scales", lambda a: a * mx.array(float("nan"), a.dtype)), "NaN or infinite"),
    (of_resident("o_proj.scales", lambda a: a.astype(mx.int32)), "int32"),
    (of_resident("o_proj.scales", lambda a: None), "is missing"),
    (of_resident("o_proj.weight", lambda a: a[:-1]), "has shape"),
    (of_resident("o_proj.weight", lambda a: a.astype(mx.int32)), "uint32"),
    (of_resident("input_layernorm.weight", lambda a: a[:-1]), "has shape"),
    (of_resident("input_layernorm.weight", lambda a: None), "is missing"),
    (one_tensor_more, "model.extra"),
    (truncate_resident, "resident"),
    (of_template("{{ raise_exception('no system role') }}"), "no system role"),
    (of_template("{{ ''.__class__.__mro__[1].__subclasses__() }}"), "template"),
    (of_template("{% for %}"), "template"),
]


@pytest.mark.parametrize("damage, words", DAMAGES)
def test_a_damaged_model_is_one_line(capfd, copy_dir, damage, words):
    damage(copy_dir)
    assert words in fails(capfd, "--model", copy_dir)


@pytest.fixture
def no_hub(monkeypatch):
    """Simulates a Hub that does not answer: its library logs that it tries again."""
    import huggingface_hub

    def unreachable(*_, **__):
        log = logging.getLogger("huggingface_hub.utils._http")
        for attempt in range(1, 6):
            log.warning("'[Errno -2] Name or service not known' thrown while requesting GET https://huggingface.co/x")
            log.warning(f"Retrying in 1s [Retry {attempt}/5].")
        log.warning("something else")
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)


def test_retries_of_the_hub_are_one_line(capfd, caplog, no_hub):
    code, _, err = command(capfd, "--model", "org/name")
    warning, error = [line for line in err.splitlines() if line.startswith(("warning: ", "error: "))]
    assert err.count("Retrying") == 0 and [record.message for record in caplog.records] == ["something else"]
    assert code == 1 and "Name or service not known" in warning
    unreached = "the Hugging Face Hub cannot be reached: no route to host"
    assert error == f"error: org/name is no file or directory here, and {unreached}"
    assert warning.startswith("warning: the Hugging Face Hub does not answer, trying again")


def test_repo_without_packed_experts_downloads_nothing_but_its_config(tmp_path, capfd):
    folder = goldens.write_variant(tmp_path / "checkpoint", "qwen3_moe", "hub")
    with SmallHub(folder, "org/name") as hub, connected(hub, tmp_path / "cache"):
        line = fails(capfd, "--model", "org/name")
        with pytest.raises(NotPackedError):
            load("org/name")
    assert "--hf-path org/name" in line and {name for _, name, _ in hub.requests} == {"config.json"}


def test_a_text_ends_with_the_models_context(copy_dir, capfd):
    """A model was never trained beyond its context."""
    edit_json(copy_dir / "generation_config.json", eos_token_id=[999])
    (copy_dir / "tokenizer_config.json").write_text("{}")
    config = read_json(copy_dir / "config.json")
    config["text_config"]["max_position_embeddings"] = 60
    (copy_dir / "config.json").write_text(json.dumps(config))
    base = ["--model", copy_dir, "--ignore-chat-template", "-p"]
    for limit in (-1, 100):
        err = command(capfd, *base, "a" * 50, "-m", limit)[2]
        assert "generation: 10 tokens" in err and "the text has the 60 tokens that the model takes" in err
    assert "generation: 5 tokens" in command(capfd, *base, "a" * 50, "-m", 5)[2]
    err = command(capfd, *base, "a" * 70, "-m", 3)[2]
    assert "the prompt has 70 tokens and the model was made for 60" in err and "generation: 3 tokens" in err


def test_interrupt_ends_with_the_statistics(copy_dir, interruptible):
    config = read_json(copy_dir / "config.json")
    config["text_config"]["max_position_embeddings"] = 10**6
    (copy_dir / "config.json").write_text(json.dumps(config))
    edit_json(copy_dir / "generation_config.json", eos_token_id=[999])  # not a token: it never ends
    (copy_dir / "tokenizer_config.json").write_text("{}")
    arguments = [sys.executable, "-m", "moeflux_mlx.generate", "--model", str(copy_dir), "-p", "a", "-m", "-1"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout.read(1)
        time.sleep(0.2)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=60)
    assert run.returncode == 130 and "tokens-per-sec" in err and "Traceback" not in err


def test_an_interrupt_that_mlx_drops_stops_at_the_next_token(model_dir, interruptible, monkeypatch, capsys):
    """The interrupt comes while MLX reads a numpy array."""
    step, calls = Model.step, []

    def interrupted(self, sequences):
        calls.append(sequences)
        if len(calls) == 3:
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
        return step(self, sequences)

    monkeypatch.setattr(Model, "step", interrupted)
    assert main(["--model", str(model_dir), "-p", "a", "-m", "30", "--ignore-chat-template"]) == 130
    assert len(calls) < 6 and "tokens-per-sec" in capsys.readouterr().err


HERE = ["--ignore-chat-template", "--prompt", "abc", "--max-tokens", "3"]


def in_shell(line, model_dir, *arguments, **environment):
    """Runs the command as `line` has it, with "$@" in it. Returns (exit code, stderr)."""
    command = [sys.executable, "-m", "moeflux_mlx.generate", "--model", str(model_dir), *HERE, *arguments]
    environment = {**child_environment(), **environment}
    done = subprocess.run(["sh", "-c", line, "sh", *command], env=environment, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    return done.returncode, done.stderr, done.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device here")
def test_a_full_stdout_is_one_line(model_dir):
    code, err, _ = in_shell('"$@" > /dev/full', model_dir)
    assert code == 1 and "error: the output cannot be written: No space left on device\n" in err


def test_a_closed_stdout_is_one_line(model_dir):
    code, err, _ = in_shell('"$@" >&-', model_dir)
    assert code == 1 and err == "error: stdout is closed, so there is nowhere to write to\n"
    assert in_shell('"$@" 2>&-', model_dir)[0] == 0


def test_a_closed_stdin_is_nothing_to_read(model_dir):
    assert in_shell('"$@" <&-', model_dir)[0] == 0
    code, err, _ = in_shell('"$@" <&-', model_dir, "--prompt", "-")
    assert code == 1 and "error: the prompt is empty" in err
    assert in_shell('"$@" <&- >&- 2>&-', model_dir)[0] == 1


def test_a_file_in_the_place_of_a_closed_stream_is_left_alone(model_dir, tmp_path):
    """Imports may open such a file, which gets the lowest free descriptor."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nos.open({str(tmp_path / 'theirs')!r}, os.O_RDWR | os.O_CREAT)"
    )
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), child_environment()["PYTHONPATH"]])}
    for line in ('"$@" 2>&-', '"$@" <&-'):
        assert in_shell(line, model_dir, **path)[0] == 0
    assert in_shell('"$@" >&-', model_dir, **path)[0] == 1
    assert (tmp_path / "theirs").read_bytes() == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device here")
def test_statistics_that_cannot_be_written_stop_no_answer(model_dir):
    code, _, out = in_shell('"$@" 2> /dev/full', model_dir)
    assert code == 0 and out


def test_other_system_errors_are_not_taken_for_output_errors(monkeypatch, capsys):
    def fail(options):
        raise OSError(errno.EMFILE, "Too many open files")

    assert execute(fail, argparse.Namespace()) == 1
    assert capsys.readouterr().err == "error: [Errno 24] Too many open files\n"


def test_a_terminal_without_the_letters(model_dir):
    """The tiny model writes arbitrary bytes, which the terminal's encoding does not have."""
    code, _, out = in_shell('"$@"', model_dir, "--max-tokens", "60", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert code == 0 and "?" in out and out.isascii()


def test_a_reader_that_closes_the_pipe_is_no_error(model_dir):
    arguments = ["--model", str(model_dir), "--prompt", "abc", "--max-tokens", "300", "--ignore-chat-template"]
    command = [sys.executable, "-m", "moeflux_mlx.generate", *arguments]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    child.stdout.read(1)
    child.stdout.close()
    assert "Traceback" not in child.stderr.read() and child.wait(timeout=60) == 1
    child.stderr.close()


@pytest.mark.parametrize("prompt", [[[5, 6, 7]], [5.5, 6], np.zeros((1, 3), np.int64), ["a"]])
def test_prompts_that_are_not_a_row_of_ids(prompt):
    with pytest.raises(RequestError, match="one row of token ids"):
        next(generate_step(prompt, tiny_model("qwen3_moe", mx.float32)))


def test_prompts_may_be_numpy_arrays():
    model = tiny_model("qwen3_moe", mx.float32)
    lists, arrays = ([t for t, _ in generate_step(p, model, max_tokens=3)] for p in (PROMPT, np.array(PROMPT)))
    assert lists == arrays


def test_a_step_longer_than_an_int(model_dir):
    model = tiny_model("qwen3_moe", mx.float32)
    assert next(generate_step(PROMPT, model, prefill_step_size=10**12))[0] == next(generate_step(PROMPT, model))[0]


def test_verbose_prints_the_text(model_dir, capsys):
    model, tokenizer = load(model_dir)
    text = library_generate(model, tokenizer, PROMPT, True, max_tokens=5)
    out = capsys.readouterr().out
    assert out.startswith(text) and "5 tokens" in out and f"{len(PROMPT)} prompt tokens" in out


def test_a_known_prompt_is_counted_as_known(capfd, model_dir, tmp_path):
    base = ["--model", model_dir, "-p", "a" * 40, "-m", "1", "--prompt-cache-dir", tmp_path]
    assert re.search(r"prompt: \d+ tokens, [\d.]+ tokens-per-sec\n", command(capfd, *base)[2])
    err = command(capfd, *base)[2]
    assert re.search(r"prompt: \d+ tokens, 1 of them computed, first token after \d+\.\d\d s\n", err)


def test_float32_is_never_rounded(capfd, model_dir):
    base = ["--model", model_dir, "-p", "a", "-m", "1", "--set", "cpu_activations=8"]
    assert command(capfd, *base, "--dtype", "bfloat16")[2].count("note: --set cpu_activations has no effect") == 1
    code, _, err = command(capfd, *base, "--dtype", "float32")
    assert code == 1 and "error: dtype float32 is computed exactly, cpu_activations 8 is not" in err


@pytest.mark.usefixtures("cpu_device")  # where a prompt has the same bits however it is cut
def test_sampling_options_choose_as_the_library_does(capfd, model_dir):
    model, tokenizer = load(model_dir)
    prompt = bytes(range(32, 127)).decode()

    def said(*options):
        return command(capfd, "--model", model_dir, "-p", prompt, "-m", "12", "--ignore-chat-template", *options)[1]

    def written(**choice):
        mx.random.seed(7)
        return library_generate(model, tokenizer, prompt, max_tokens=12, **choice) + "\n"

    penalties = [make_logits_processors(repetition_penalty=9.0, repetition_context_size=size) for size in (20, 95)]
    narrow, wide = (written(logits_processors=penalty) for penalty in penalties)
    assert said("--repetition-penalty", "9") == narrow != wide
    assert said("--repetition-penalty", "9", "--repetition-context-size", "95") == wide
    spared = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
    xtc = make_sampler(0.1, xtc_probability=1.0, xtc_threshold=0.01, xtc_special_tokens=spared)
    options = ["--temp", "0.1", "--seed", "7", "--xtc-probability", "1", "--xtc-threshold", "0.01"]
    assert said(*options) == written(sampler=xtc) != written(sampler=make_sampler(0.1))


def test_the_random_numbers_are_seeded_once_the_model_is_loaded(capfd, model_dir, monkeypatch):
    seeds = []
    monkeypatch.setattr("mlx.core.random.seed", seeds.append)
    options = ["-p", "a", "-m", "1", "--temp", "1", "--seed", "5"]
    assert fails(capfd, "--model", "/nosuch", *options) and seeds == []
    assert command(capfd, "--model", model_dir, *options)[0] == 0 and seeds == [5]


def test_options_that_have_no_effect_are_named(capfd, model_dir, tmp_path):
    idle = ["--top-p", "0.5", "--seed", "3", "--expert-cache-gb", "1", "--prefetch", "off", "--revision", "main"]
    idle += ["--ignore-chat-template", "--system-prompt", "x", "--prompt-cache-gb", "2", "-p", "a", "-m", "1"]
    idle += ["--no-vision", "--image-tokens", "64", "--repetition-context-size", "64", "--xtc-threshold", "0.2"]
    code, _, err = command(capfd, "--model", model_dir, *idle)
    assert code == 0 and [line for line in err.splitlines() if line.startswith("note: ")] == [
        "note: --top-p, --seed have no effect at --temp 0",
        "note: --xtc-threshold has no effect without --xtc-probability",
        "note: --repetition-context-size has no effect without --repetition-penalty",
        "note: --expert-cache-gb, --prefetch have no effect where experts are mapped",
        "note: --system-prompt has no effect with --ignore-chat-template",
        "note: --prompt-cache-gb has no effect without --prompt-cache-dir",
        "note: --image-tokens has no effect with --no-vision",
        "note: --revision has no effect where --model is a directory",
    ]
    used = ["--temp", "1", "--top-p", "0.5", "--seed", "3", "--expert-io", "pread", "--expert-cache-gb", "1"]
    used += ["--system-prompt", "x", "--prompt-cache-dir", tmp_path, "--prompt-cache-gb", "2", "--prefetch", "off"]
    used += ["--repetition-penalty", "2", "--repetition-context-size", "64"]
    used += ["--xtc-probability", "0.5", "--xtc-threshold", "0.2"]
    assert "note: " not in command(capfd, "--model", model_dir, *used, "-p", "a", "-m", "1")[2]


def test_what_an_option_is_by_default_is_known():
    defaults = vars(parser().parse_args([]))
    assert {name: defaults[name] for name in NOT_GIVEN} == NOT_GIVEN
    for name in ("seed", "expert_cache_gb", "revision", "system_prompt", "prompt_cache_dir"):
        assert defaults[name] is None and name not in NOT_GIVEN


def test_a_prompt_beyond_the_planned_context_is_reported(capfd, model_dir):
    base = ["--model", model_dir, "-p", "a" * 40, "-m", "1", "--ignore-chat-template", "--context"]
    assert "the prompt has 40 tokens and memory was planned for 30; --context 80" in command(capfd, *base, 30)[2]
    assert "planned" not in command(capfd, *base, 40)[2]


@pytest.mark.parametrize("family, said", [("qwen3_next", True), ("qwen3_moe", False)])
def test_a_saved_state_out_of_reach_is_reported(capfd, family, said, tmp_path):
    base = ["--model", tiny_directory(family), "-m", "1", "--prompt-cache-dir", tmp_path, "-p"]
    common = "x" * 60
    assert "more tokens match" not in command(capfd, *base, common + "a" * 20)[2]
    err = command(capfd, *base, common + "b" * 20)[2]
    match = re.search(r"prompt cache: (\d+) more tokens match a saved prompt.*--system-prompt", err)
    assert (match is not None) == said and (not said or 60 <= int(match[1]) < 90)


def test_help_is_in_groups():
    text = parser().format_help()
    for title in ("prompt:", "answer:", "model:", "memory and expert I/O:", "prompt cache:"):
        assert f"\n{title}\n" in text


def test_bad_option_is_a_usage_error(capfd):
    with pytest.raises(SystemExit) as exit_:
        main(["--expert-io", "quick"])
    assert exit_.value.code == 2


@pytest.mark.parametrize("step", [4, 20, 512])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1], PROMPT[:2]])
def test_processors_see_every_token(prompt, step):
    seen = []

    def look(tokens, logits):
        seen.append(tokens.tolist())
        return logits

    model = tiny_model("qwen3_moe", mx.float32)
    steps = generate_step(prompt, model, max_tokens=3, prefill_step_size=step, logits_processors=[look])
    tokens = [token for token, _ in steps]
    assert seen == [prompt, [*prompt, tokens[0]], [*prompt, *tokens[:2]]]


def test_logprobs_are_normalised(model_dir):
    _, logprobs = next(generate_step(PROMPT, tiny_model("qwen3_moe", mx.float32), max_tokens=1))
    assert np.exp(np.array(logprobs)).sum() == pytest.approx(1, abs=1e-5)
