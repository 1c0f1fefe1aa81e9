"""The package keeps the limits of scripts/structure.py, which sees what is planted."""

import importlib.util
import sys
from pathlib import Path

import pytest

from moeflux_mlx.mixers.registry import ROOMS

FILE = Path(__file__).resolve().parent.parent / "scripts" / "structure.py"
SPEC = importlib.util.spec_from_file_location("structure", FILE)
structure = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(structure)

NAMING = '''"""Latent, Delta."""
from kinds import (
    Latent,
)
import kinds  # Delta
kind = kinds.Delta if isinstance(1, Latent) else "Mamba2"
match kind:
    case kinds.Mamba2():
        pass
'''
LONG_DOCSTRING = '    """One.\n' + "\n" * 70 + '    """\n'


def function(lines, docstring=""):
    return "def f():\n" + docstring + "    pass\n" * (lines - 1)


@pytest.mark.parametrize(
    "text, counts",
    [
        (NAMING, (3, 0, 0)),
        (function(60, LONG_DOCSTRING), (0, 0, 0)),
        (function(61), (0, 0, 1)),
        ("class C:\n" + "".join(f"    {line}\n" for line in function(61).splitlines()), (0, 0, 1)),
        ("\n" * 400, (0, 0, 0)),
        ("\n" * 401, (0, 1, 0)),
    ],
)
def test_plants_are_seen(tmp_path, text, counts):
    (tmp_path / "planted.py").write_text(text)
    assert tuple(map(len, structure.places(tmp_path, reasons=()))) == counts


def test_own_modules_may_name_their_kind(tmp_path):
    for name in ("families/qwen3.py", "mixers/delta/spec.py", "ops/linear.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("Delta\n")
    assert structure.places(tmp_path, reasons=())[0] == ["ops/linear.py:1"]


def test_the_kinds_exist():
    assert {kind.__name__ for kind in ROOMS} <= structure.KINDS


def test_a_reason_belongs_to_a_long_module():
    assert structure.long_modules({"a": 401, "b": 400, "c": 401}, ["a", "b"]) == [
        "c has 401 lines",
        "b needs no reason",
    ]


def test_the_package_is_at_its_limits(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["structure.py"])
    assert structure.main() == 0, capsys.readouterr().out
    for change, message in (-1, "too many"), (1, "lower the limit to"):
        limits = {name: limit + change for name, limit in structure.LIMITS.items()}
        with monkeypatch.context() as changed:
            changed.setattr(structure, "LIMITS", limits)
            assert structure.main() == 1
        assert capsys.readouterr().out.count(message) == 3
