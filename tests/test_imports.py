"""Imports point down the order of packages, there are no cycles inside a package, and the public names exist."""

import ast
import functools
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "moeflux_mlx"

SPECS = "mixers.*.spec"
# From the bottom up: packages, and modules outside of packages. Each may import from those before it.
ORDER = [
    "version",
    "errors",
    "process",
    "installation",
    "files",
    "foreign",
    "quant",
    "kinds",
    SPECS,
    "families",
    "spec",
    "formats",
    "text",
    "ops",
    "rounding",
    "caches",
    "layers",
    "mixers",
    "state",
    "experts",
    "model",
    "packing",
    "calibration",
    "vision",
    "kept",
    "planning",
    "driving",
    "opening",
    "several",
    "tools",
    "server",
    "cli",
]
# Commands, and the modules that collect the public names: above all of them.
COMMANDS = {
    "generate",
    "chat",
    "models",
    "public",
    "launch",
    "convert",
    "plan",
    "doctor",
    "benchmark",
    "serve",
    "evaluate",
    "ranks",
    "tune",
    "list",
    "remove",
    "pull",
}
# Modules of one way of mixing tokens, from the bottom up: what it is, computes, keeps, and how a layer uses it. Others
# of its folder belong to `op`.
PARTS = ("spec", "op", "cache", "module")
MODULES = sorted(".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in PACKAGE.rglob("*.py"))
NAMES = frozenset(MODULES)


def imports_of(source, module):
    """Returns this package's modules that `source`, the text of `module`, imports: at once or later, also for types
    only."""
    package, imports = module.split(".")[:-1], set()
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            imports |= {alias.name.removeprefix("moeflux_mlx.") for alias in node.names if "moeflux_mlx." in alias.name}
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            stem = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
        elif (node.module or "").split(".")[0] == "moeflux_mlx":
            stem = node.module.split(".")[1:]
        else:
            continue
        inner = {".".join([*stem, alias.name]) for alias in node.names}
        modules = {name for name in inner if name in NAMES or f"{name}.__init__" in NAMES}
        imports |= modules or {".".join(stem) or "__init__"}
    return {f"{name}.__init__" if f"{name}.__init__" in NAMES else name for name in imports}


def statements(tree):
    """Yields each statement below a tree. Only statements contain imports."""
    left = [tree]
    while left:
        yield (node := left.pop())
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            left += getattr(node, field, ())


@functools.cache
def graph():
    """Returns module -> the modules that it imports."""
    files = {name: PACKAGE / (name.replace(".", "/") + ".py") for name in MODULES}
    return {name: imports_of(file.read_text(), name) - {name} for name, file in files.items()}


def package(module):
    """Returns the place of a module: its package, or the one of all mixers' specs, which are plain data."""
    first, last = module.split(".")[0], module.split(".")[-1]
    return SPECS if first == "mixers" and last in ("spec", "__init__") else first


def height(module):
    """Returns the height of a module's place. Commands and the modules of public names are above all."""
    return ORDER.index(package(module)) if package(module) in ORDER else len(ORDER)


def mixer_of(module):
    """Returns the mixer that owns a module, or None."""
    parts = module.split(".")
    return parts[1] if parts[0] == "mixers" and len(parts) == 3 else None


def floor(module):
    """Returns the height of a mixer's module in its folder."""
    last = module.split(".")[-1]
    return PARTS.index(last if last in PARTS else "op")


def cycle(imports):
    """Returns names that import each other in a cycle; none if there is no cycle."""
    left = {name: set(used) for name, used in imports.items()}
    while free := [name for name, used in left.items() if not used & set(left)]:
        for name in free:
            del left[name]
    return sorted(left)


def wrong_about_mixers(imports):
    """Returns (module, imported module): a mixer's module imports another mixer's or one that is above it, or something
    else knows more of a mixer than `mixers.registry` and the readers of configurations tell.
    """
    wrong = []
    pairs = [(module, used) for module, all_used in imports.items() for used in sorted(all_used) if mixer_of(used)]
    for module, used in pairs:
        own, theirs = mixer_of(module), mixer_of(used)
        if own is not None:
            allowed = own == theirs and floor(used) <= floor(module)
        else:
            readers = module.startswith("families.") and used.endswith(".spec")
            allowed = module == "mixers.registry" or readers or used.endswith(".__init__")
        wrong += [] if allowed else [(module, used)]
    return wrong


def test_every_module_has_a_place():
    firsts = {package(module) for module in MODULES}
    assert firsts <= {*ORDER, *COMMANDS, "__init__", "__main__"}


def test_imports_point_down():
    for module in MODULES:
        up = height(module)
        others = [name for name in graph()[module] if package(name) != package(module)]
        wrong = [name for name in others if height(name) >= up and up < len(ORDER)]
        assert not wrong, f"{module} imports {wrong}"
        assert all((PACKAGE / (name.replace(".", "/") + ".py")).exists() for name in graph()[module])


def test_the_model_knows_nothing_of_files():
    """Only filling a model and the plan of its tensors read files; where experts are is behind a protocol."""
    files = {"formats.packed", *(f"experts.{name}" for name in ("mapped", "streamed", "reader", "pool", "memory"))}
    for module in (
        name for name in MODULES if name.startswith(("model.", "mixers.", "layers")) and name != "model.weights"
    ):
        assert not graph()[module] & {*files, "experts.routed"}, module


def test_opening_a_checkpoint_imports_nothing_that_writes_one():
    seen, todo = set(), ["opening.engine"]
    while todo:
        seen.add(module := todo.pop())
        todo += graph()[module] - seen
    assert "packing.plan" in seen
    assert not seen & {"packing.conversion", "packing.writer", "packing.shards", "packing.supply"}


def test_each_mixer_is_a_folder_of_its_own():
    mixers = {mixer_of(module) for module in MODULES} - {None}
    assert all(f"mixers.{mixer}.{part}" in MODULES for mixer in mixers for part in PARTS)
    assert wrong_about_mixers(graph()) == []


def test_there_are_no_cycles():
    assert cycle(graph()) == []


def test_faults_are_seen():
    assert imports_of("from ..model.decoder import Model\nfrom . import native", "ops.linear") == {
        "model.decoder",
        "ops.native",
    }
    assert imports_of("if TYPE_CHECKING:\n    from .opening import engine", "chat") == {"opening.engine"}
    assert imports_of("def f():\n    import moeflux_mlx.ops.native", "errors") == {"ops.native"}
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
    planted = {
        "mixers.mamba.op": {"mixers.delta.op", "mixers.mamba.spec", "ops.rows"},
        "mixers.delta.channel_op": {"mixers.delta.cache"},
        "mixers.registry": {"mixers.delta.module"},
        "families.qwen3": {"mixers.delta.spec", "mixers.delta.op"},
        "planning.needs": {"mixers.registry", "mixers.delta.spec"},
    }
    assert wrong_about_mixers(planted) == [
        ("mixers.mamba.op", "mixers.delta.op"),
        ("mixers.delta.channel_op", "mixers.delta.cache"),
        ("families.qwen3", "mixers.delta.op"),
        ("planning.needs", "mixers.delta.spec"),
    ]


def test_public_names_exist():
    package = importlib.import_module("moeflux_mlx")
    assert package.__all__ == sorted(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)
    assert dir(package) == package.__all__ and not hasattr(package, "nothing")
    assert inspect.isfunction(package.generate), "not the command of the same name"


def test_importing_the_package_imports_no_heavy_libraries():
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
        "llguidance",
    )
    code = f"import sys, moeflux_mlx; print([m for m in {('mlx', 'numpy', *heavy)} if m in sys.modules])"
    code += f"; moeflux_mlx.load; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n[]\n"


def test_every_file_of_tests_has_a_name_of_its_own():
    """pytest imports the files by their names."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
