"""Imports point down the layers and never sideways; the public names are the listed ones."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "moeflux_mlx"

# From the bottom up. A module may import from any lower line, and not from its own.
LAYERS = [
    {"errors", "resources", "ram", "wired"},
    {"process", "config", "io_mode", "sampling", "thinking", "chat_template", "kernels", "native", "paths"},
    {"cpu", "mixer_kernels", "layout", "cache", "tokenizer", "checkpoint", "prefetch", "output"},
    {"packed", "pool", "sanitize", "rewind", "turns", "rope", "router", "decode"},
    {"linear", "reader", "fingerprint"},
    {"attention", "gated_delta", "mla", "moe", "loader"},
    {"model", "matrix"},
    {"experts", "weights", "resident_file", "stream", "snapshot", "unpacked"},
    {"memory", "hub"},
    {"load", "expert_file", "prompt_file"},
    {"prompt_cache"},
    {"session", "command"},
    {"generate", "chat", "convert", "plan", "__init__"},
]
HEIGHT = {name: i for i, layer in enumerate(LAYERS) for name in layer}
FORBIDDEN = {"model": {"packed", "loader"}, "moe": {"packed", "loader"}, "loader": {"model"}}
MODULES = sorted(file.stem for file in PACKAGE.glob("*.py"))


def imports_of(source):
    """Names of this package's modules that `source` imports when it runs; not those for type checkers only."""
    found = set()
    for node in ast.walk(_Running().visit(ast.parse(source))):
        if isinstance(node, ast.ImportFrom):
            inside = node.level == 1 or (node.module or "").startswith("moeflux_mlx")
            name = (node.module or "").removeprefix("moeflux_mlx").lstrip(".")
            if inside:
                found |= {name.split(".")[0]} if name else {alias.name for alias in node.names}
    return found & set(HEIGHT)


class _Running(ast.NodeTransformer):
    def visit_If(self, node):
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def test_every_module_has_a_layer():
    assert set(MODULES) == set(HEIGHT)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    used = imports_of((PACKAGE / f"{module}.py").read_text())
    assert not {name for name in used if HEIGHT[name] >= HEIGHT[module]}
    assert not used & FORBIDDEN.get(module, set())


def test_an_upward_import_is_seen():
    assert imports_of("from .model import Model\nfrom . import kernels") == {"model", "kernels"}


def test_public_names_exist():
    package = importlib.import_module("moeflux_mlx")
    assert package.__all__ == sorted(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)


def test_importing_the_package_leaves_heavy_libraries_alone():
    heavy = (
        "mlx_lm",
        "transformers",
        "torch",
        "huggingface_hub",
        "sentencepiece",
        "tokenizers",
        "jinja2",
        "tqdm",
        "prompt_toolkit",
    )
    code = f"import sys, moeflux_mlx; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
