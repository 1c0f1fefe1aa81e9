"""Every command exists under both of its names, and importing one does not hide the library's functions."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import child_environment

import moeflux_mlx
from moeflux_mlx.cli.main import COMMANDS, main
from moeflux_mlx.version import VERSION, full_version

PYTHON = [sys.executable, "-W", "error"]


# Runs modules as `python -m` does. Each runs in a fork of a process that has already imported the package, as runpy
# does first, and the modules that take longest to import.
MODULES = """
import json, os, runpy, sys, tempfile
import moeflux_mlx
try:
    import moeflux_mlx.opening.engine, moeflux_mlx.formats.hub, moeflux_mlx.text.tokenizer, moeflux_mlx.cli.run
    import moeflux_mlx.calibration.calibrated, moeflux_mlx.cli.diagnosis, moeflux_mlx.cli.serving
    import moeflux_mlx.tools.tuning
except ImportError:
    pass  # MLX is missing

def said(module, *arguments):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
            sys.argv[1:] = arguments
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            sys.exit()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, *(file.seek(0) or file.read() for file in (out, err))

outputs = [said(*one) for one in json.loads(sys.argv[1])]
print(json.dumps(outputs))
"""


PACKAGE = Path(moeflux_mlx.__file__).parent
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


def run(*command, **environment):
    return subprocess.run(command, env=child_environment() | environment, capture_output=True, text=True)


def modules_that_run():
    """Returns the modules that `python -m` runs, without `moeflux_mlx` itself."""
    files = [file for file in PACKAGE.rglob("*.py") if 'if __name__ == "__main__":' in file.read_text()]
    parts = [file.relative_to(PACKAGE.parent).with_suffix("").parts for file in files]
    return sorted({".".join(path).removesuffix(".__main__") for path in parts} - {"moeflux_mlx"})


@needs_fork
def test_without_mlx_every_command_says_how_to_install_it(tmp_path):
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "core.py").write_text("raise ImportError('libmlx.so: cannot open shared object file')")
    assert modules_that_run() == sorted(f"moeflux_mlx.{name}" for name in COMMANDS)
    ways = [way for name in COMMANDS for way in ((f"moeflux_mlx.{name}", "--nonsense"), ("moeflux_mlx", name))]
    path = os.pathsep.join([str(tmp_path), child_environment()["PYTHONPATH"]])
    done = run(*PYTHON, "-c", MODULES, json.dumps([*ways, ("moeflux_mlx", "--help")]), PYTHONPATH=path)
    *outputs, (code, out, err) = json.loads(done.stdout)
    assert (code, err) == (0, "") and out.startswith("usage: moeflux COMMAND")
    for way, (code, out, err) in zip(ways, outputs, strict=True):
        assert (code, out, err.count("\n")) == (1, "", 1), (way, err)
        assert err.startswith("error: MLX cannot be imported (libmlx.so: cannot open"), way
        assert "pip install 'mlx[cpu]'" in err, way


@needs_fork
def test_every_command_has_two_names():
    ways = [way for name in COMMANDS for way in ((f"moeflux_mlx.{name}", "--help"), ("moeflux_mlx", name, "--help"))]
    done = run(*PYTHON, "-c", MODULES, json.dumps(ways))
    outputs = json.loads(done.stdout)
    for name, module, package in zip(COMMANDS, outputs[::2], outputs[1::2], strict=True):
        code, out, err = module
        assert code == 0 and not err and module == package, name
        assert out.startswith(f"usage: python -m moeflux_mlx.{name} ")


def test_a_command_is_run_as_a_module():
    module, package = run(*PYTHON, "-m", "moeflux_mlx.plan", "-h"), run(*PYTHON, "-m", "moeflux_mlx", "plan", "-h")
    assert module.returncode == package.returncode == 0 and not module.stderr + package.stderr
    assert module.stdout == package.stdout and module.stdout.startswith("usage: python -m moeflux_mlx.plan ")


def test_the_console_script():
    code = "import sys; sys.argv[0] = '/usr/bin/moeflux'; from moeflux_mlx.cli.main import main; sys.exit(main())"
    done = run(*PYTHON, "-c", code, "plan", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: moeflux plan ")
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'moeflux = "moeflux_mlx.cli.main:main"' in text


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "moeflux_mlx", "plan"],
        ["-m", "moeflux_mlx.plan"],
        ["-c", "from moeflux_mlx.cli.main import main; main()", "plan"],
    ],
)
def test_an_interrupt_during_the_imports_is_silent(words, tmp_path, interruptible):
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "core.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), child_environment()["PYTHONPATH"]])
    done = run(*PYTHON, *words, PYTHONPATH=path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_interrupts_that_are_ignored_stay_ignored(tmp_path):
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "core.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise ImportError('on')"
    )
    path = os.pathsep.join([str(tmp_path), child_environment()["PYTHONPATH"]])
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from moeflux_mlx.cli.main import main; main()"
    assert "MLX cannot be imported (on)" in run(*PYTHON, "-c", code, "plan", PYTHONPATH=path).stderr


@pytest.mark.parametrize("argv, code", [([], 2), (["--help"], 0), (["-h"], 0)])
def test_without_a_command_the_commands_are_listed(argv, code, capsys):
    assert main(argv) == code
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)
    lines = [line for line in out.splitlines() if line.startswith("  ")]
    columns = {len(re.match(r"  \w+ +", line)[0]) for line in lines}
    assert len(columns) == 1 and len(lines) == len(COMMANDS) and max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_short_lines_and_short_texts(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parser = importlib.import_module(COMMANDS[name][0]).parser()
    formatter = parser.formatter_class(parser.prog)
    texts = {str(action.option_strings): formatter._expand_help(action) for action in parser._actions}
    assert {option: text for option, text in texts.items() if len(text) > 200} == {}
    assert len(parser.description) <= 300
    assert [line for line in parser.format_help().splitlines() if len(line) > 80] == []


def test_the_default_context_is_the_one_that_the_command_plans():
    for name, (module, _) in COMMANDS.items():
        parser = importlib.import_module(module).parser()
        text = " ".join(parser.format_help().split())
        if {"--prefetch", "--context"} <= set(parser._option_string_actions):
            is_own = parser.get_default("pool_share") is not None
            assert is_own == (name in ("serve", "launch"))
            assert ("default: the model's own, halved until" in text) == is_own
            assert ("default: 8192, or less" in text) != is_own


def test_serve_names_the_models_as_its_option_takes_them():
    text = importlib.import_module("moeflux_mlx.serve").parser().format_help()
    assert "--model MODEL " in text and "MODELS" not in text


@pytest.mark.parametrize(
    "word, meant",
    [
        ("--nonsense", ""),
        ("--foo", ""),
        ("--max_tokens", "--max-tokens"),
        ("--temprature", "--temp"),
        ("--temperature", "--temp"),
        ("--topk", "--top-k"),
    ],
)
def test_only_a_similar_option_is_proposed(word, meant, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["generate", word])
    err = capsys.readouterr().err
    assert re.findall(r"did you mean (\S+)\?", err) == [meant] * bool(meant) and err.count("\n") == 1


def test_help_is_a_command_too(capsys):
    assert main(["help"]) == 0 and capsys.readouterr().out.startswith("usage: moeflux COMMAND")
    with pytest.raises(SystemExit, match="0"):
        main(["help", "list"])
    assert "list" in capsys.readouterr().out.splitlines()[0]


def test_a_misspelt_command_is_named(capsys):
    assert main(["speak"]) == 2
    err = capsys.readouterr().err
    assert "no command 'speak'; there are: generate, chat" in err and "did you mean" not in err
    for word, meant in (("benchmrk", "benchmark"), ("serv", "serve"), ("gen", "generate")):
        assert main([word]) == 2
        assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")


@pytest.mark.parametrize("name", ["chat", "plan", "serve", "benchmark"])
def test_a_model_without_its_option_is_told_the_option(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "models/qwen"])
    assert "unrecognized arguments: models/qwen; a model is given with --model;" in capsys.readouterr().err


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"moeflux-mlx {full_version()}\n"
    assert moeflux_mlx.__version__ == VERSION


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_commands_that_compute_nothing_start_without_mlx(word):
    code = f"import sys; from moeflux_mlx.cli.main import main; main(['{word}'])"
    done = run(*PYTHON, "-c", f"{code}; print({{'mlx', 'numpy', 'argparse'}} & set(sys.modules))")
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_a_reader_that_has_gone_is_no_fault(word):
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [*PYTHON, "-m", "moeflux_mlx", word], env=child_environment(), stdout=writes, stderr=subprocess.PIPE
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, b"")


def test_importing_a_command_leaves_the_functions():
    code = "import moeflux_mlx, importlib"
    for module in ("generate", "generate.__main__", "chat", "plan", "convert"):
        code += f"; importlib.import_module('moeflux_mlx.{module}')"
        code += "; assert callable(moeflux_mlx.generate)"
    assert run(*PYTHON, "-c", code).returncode == 0
    assert callable(moeflux_mlx.generate) and moeflux_mlx.generate.__module__ == "moeflux_mlx.driving.generation"
