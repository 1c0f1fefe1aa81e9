"""Every command exists by both of its names, and importing one leaves the library's functions alone."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import child_environment

import moeflux_mlx
from moeflux_mlx.cli.main import COMMANDS, main

PYTHON = [sys.executable, "-W", "error"]


def run(*command):
    return subprocess.run(command, env=child_environment(), capture_output=True, text=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_two_names(name):
    module = run(*PYTHON, "-m", f"moeflux_mlx.{name}", "--help")
    package = run(*PYTHON, "-m", "moeflux_mlx", name, "--help")
    assert module.returncode == package.returncode == 0 and not module.stderr + package.stderr
    assert module.stdout == package.stdout and module.stdout.startswith(f"usage: python -m moeflux_mlx.{name} ")


def test_the_console_script():
    code = "import sys; sys.argv[0] = '/usr/bin/moeflux'; from moeflux_mlx.cli.main import main; sys.exit(main())"
    done = run(*PYTHON, "-c", code, "plan", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: moeflux plan ")
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'moeflux = "moeflux_mlx.cli.main:main"' in text


@pytest.mark.parametrize("argv, code", [([], 2), (["--help"], 0), (["-h"], 0)])
def test_without_a_command_the_commands_are_listed(argv, code, capsys):
    assert main(argv) == code
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


def test_a_misspelt_command_is_named(capsys):
    assert main(["speak"]) == 2
    assert "no command 'speak'; there are: generate, chat" in capsys.readouterr().err
    assert main(["benchmrk"]) == 2
    assert capsys.readouterr().err.endswith("; did you mean benchmark?\n")


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"moeflux-mlx {moeflux_mlx.__version__}\n"


@pytest.mark.parametrize("module", ["generate", "generate.__main__", "chat", "plan", "convert"])
def test_importing_a_command_leaves_the_functions(module):
    code = f"import moeflux_mlx, moeflux_mlx.{module}; assert callable(moeflux_mlx.generate)"
    assert run(*PYTHON, "-c", code).returncode == 0
    assert callable(moeflux_mlx.generate) and moeflux_mlx.generate.__module__ == "moeflux_mlx.engine.generation"
