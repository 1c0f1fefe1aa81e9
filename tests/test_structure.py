"""The package has the shape that scripts/structure.py demands, which sees what is planted."""

import importlib.util
from pathlib import Path

import pytest

from moeflux_mlx.mixers.registry import PARTS_OF

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
UNNAMED = """
def f(a: int, *b: Any) -> AnyArray: ...
def g(a: int, *, b: "list[Any] | None" = None): ...
def _private(a: Any): ...
class C:
    kept: Any = 0
    def f(self) -> typing.Any: ...
    def __init__(self, given: Any): ...
    async def g(self, **given: Any): ...
    def h(self, make=lambda: Any) -> JsonValue:
        def inner(one: Any): ...
class _C:
    def f(self) -> Any: ...
"""
LONG_DOCSTRING = '    """One.\n' + "\n" * 70 + '    """\n'


def function(lines, docstring=""):
    return "def f():\n" + docstring + "    pass\n" * (lines - 1)


@pytest.fixture
def package(tmp_path):
    """A package that describes three mixers."""
    for name in ("latent", "delta", "mamba"):
        (tmp_path / "mixers" / name).mkdir(parents=True)
    (tmp_path / "mixers/latent/spec.py").write_text("class Latent:\n    pass\n")
    (tmp_path / "mixers/delta/spec.py").write_text("class Delta:\n    pass\n")
    (tmp_path / "mixers/mamba/spec.py").write_text("class Mamba2:\n    pass\n")
    return tmp_path


@pytest.mark.parametrize(
    "text, count",
    [
        (NAMING, 4),
        (function(60, LONG_DOCSTRING), 0),
        (function(61), 1),
        ("class C:\n" + "".join(f"    {line}\n" for line in function(61).splitlines()), 1),
        ("\n" * 400, 0),
        ("\n" * 401, 1),
        (UNNAMED, 4),
        ("ModelArgs.from_file(path)\nfound = is_packed(path)\nlocated.is_packed, Tokenizer.from_file(path)\n", 2),
    ],
)
def test_plants_are_seen(package, text, count):
    (package / "planted.py").write_text(text)
    found = structure.faults(package, reasons=())
    assert len(found) == count and all("planted.py" in fault for fault in found)


def test_mixers_and_families_may_name_a_mixer(package):
    for name in ("families/qwen3.py", "mixers/delta/op.py", "ops/linear.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("Delta\n")
    assert structure.faults(package, reasons=()) == ["ops/linear.py:1 names Delta"]


def test_every_mixer_is_looked_for():
    assert {kind.__name__ for kind in PARTS_OF} <= structure.described(structure.PACKAGE)


def test_a_reason_belongs_to_a_long_module():
    assert structure.long_modules({"a": 401, "b": 400, "c": 401}, ["a", "b"]) == [
        "c has 401 lines",
        "b needs no reason",
    ]


def test_the_package_has_this_shape():
    assert structure.faults(structure.PACKAGE) == []


REACHING = """
import helper
from moeflux_mlx.ops import _planned
thing._kept = thing.__doc__ = self._kept = helper._kept
monkeypatch.setattr(thing, "_planned", thing.public)
monkeypatch.setattr("moeflux_mlx.ops._planned", thing._replace(kept=thing._unknown))
"""


def test_tests_that_reach_for_private_names_are_seen(package, tmp_path_factory):
    (package / "module.py").write_text("class Thing:\n    _kept = _replace = 0\n\n\ndef _planned():\n    pass\n")
    tests = tmp_path_factory.mktemp("tests")
    (tests / "helper.py").touch()
    (tests / "test_thing.py").write_text(REACHING)
    named = [(3, "_planned"), (4, "_kept"), (5, "_planned"), (6, "_planned")]
    want = [f"test_thing.py:{line} reaches for {name}" for line, name in named]
    assert structure.private_places(package, tests) == want


def test_replaced_names_are_counted(tmp_path):
    (tmp_path / "test_thing.py").write_text("monkeypatch.setattr(a, 'b', 1)\nmonkeypatch.setenv('A', 'b')\n")
    (tmp_path / "test_other.py").write_text("patch.setattr(a, 'b', 1)\n")
    assert structure.patches(tmp_path) == {"test_thing.py": 1}


def test_questions_for_the_kind_of_an_array_are_seen(package):
    asking = (
        "isinstance(x, mx.array)\nisinstance(x, (int, np.ndarray))\nlibrary is not mx\nbackend.computes_at_once(x)\n"
    )
    for name in ("module.py", "ops/backend.py"):
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(f"{asking}isinstance(x, int) and library.array(x) is None\nlen(np.ndarray)\n")
    want = [f"module.py:{line} asks for the kind of an array" for line in (1, 2, 3, 4)]
    assert structure.kind_places(package) == want


UNUSED = """
from typing import NamedTuple
import module
TOP, LAST = range(2)
OF_TYPE = 0
def used(): return LAST
def dead(): return dead()
def hidden(): ...
class Thing:
    field: int
    dead_field: int
    def __init__(self): self.kept = self.lost = used()
    def method(self, x: "list[Thing]"): self.method = x.field + self.kept
    def dead_method(self): ...
    def seam(self): ...
class Pair(NamedTuple):
    first: int
def reader(x: "Unpack[OF_TYPE]", y: Pair): return getattr(x, "hidden")
module.reader
"""


def test_names_that_nothing_uses_are_seen(package):
    (package / "module.py").write_text(UNUSED)
    found = structure.unused(package, ["seam", "Thing.method", "used"])
    assert [text.rpartition(" ")[2] for text in found[:-1] if "module.py" in text] == [
        "dead",
        "Thing.dead_field",
        "Thing.dead_method",
        "Thing.lost",
    ]
    assert found[-1] == "used needs no reason: it is used, or gone"


def test_members_of_public_classes_are_for_users(package):
    (package / "public.py").write_text("from module import Thing\n")
    (package / "module.py").write_text("class Thing:\n    def method(self): ...\n    def other(self): ...\n")
    assert not [text for text in structure.unused(package, []) if "module.py" in text]


def test_the_package_has_no_names_that_nothing_uses():
    assert structure.unused(structure.PACKAGE) == []


def test_contributing_says_the_limits():
    text = " ".join((FILE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    said = (
        f"a module of more than {structure.MODULE_LINES} lines has a reason",
        f"no function has more than {structure.FUNCTION_LINES} lines",
        f"asks in at most {structure.KIND_PLACES} places whether an array",
        f"private names of the package in at most {structure.PRIVATE_PLACES} places",
        f"they replace names (`monkeypatch.setattr`) in at most {structure.PATCHES}.",
    )
    assert [words for words in said if words not in text] == []
