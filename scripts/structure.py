#!/usr/bin/env python3
"""Checks the shape of the package: where ways of mixing tokens are named, how long modules and functions are, which
public signatures have types without a name, how often code asks whether an array is numpy's or MLX's, which names
nothing uses, and how often tests reach for private names or replace names.

    scripts/structure.py

A way of mixing tokens is known to its own folder in `mixers/` and to the readers of configurations; everything else
asks it. A module of more than 400 lines needs a reason in `LONG`; no function has more than 60, besides its docstring.
The signature of a public function or method has no bare `Any`: the type has a name, such as `AnyArray` or `JsonValue`.
Code asks for the kind of an array in at most `KIND_PLACES` places besides `KIND`, whose functions serve both.
A function, class, variable, method or attribute that no module of the package uses goes, also if tests or scripts use
it, unless it belongs to `PUBLIC` or has a reason in `SEAMS`. A use is found by its name: in the module that defines it,
an import, an attribute of anything, a string that is this name, or one in an annotation.
A model's directory is looked at once: only the modules in `QUESTIONS` ask what lies there, others ask a `Located`.
Only `LOOP` takes prompts and steps through a model: it alone calls a model's `advance` and `step`.
Tests use public names: they reach for private ones of the package, which begin with one underscore, in at most
`PRIVATE_PLACES` places. They replace names by `monkeypatch.setattr` in at most `PATCHES` places: an argument or a small
fake serves better. Prints each fault and fails if there is one. tests/test_imports.py checks that imports point
down without cycles.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

PACKAGE = Path(__file__).resolve().parent.parent / "moeflux_mlx"
TESTS = PACKAGE.parent / "tests"
MAY_NAME = ("mixers", "families")  # packages that may name a mixer
MODULE_LINES, FUNCTION_LINES, PRIVATE_PLACES, KIND_PLACES, PATCHES = 400, 60, 60, 53, 397
KIND, LOOP = PurePath("ops/backend.py"), PurePath("driving/loop.py")
QUESTIONS = {  # about a model's directory, besides `packing/located.py`: the modules that ask for a reason of their own
    "is_packed": ("formats/checkpoint.py", "packing/supply.py"),  # of what is converted
    "read_config": ("formats/checkpoint.py", "packing/supply.py"),
    "described_files": (),
    "ModelArgs.from_file": ("packing/plan.py",),
    "load_tokenizer": ("packing/gguf_folder.py", "calibration/calibrated.py"),
}
DRIVES = re.compile(r"(.*\.)?_?model\.(advance|step)")
PRIVATE = re.compile(r"(?:.*\.)?(_[A-Za-z]\w*)")  # a name, perhaps with those of what it belongs to
NAMES = re.compile(r"\w+(\[\w+\])?")
UNNAMED = re.compile(r"\bAny\b")
PATCH = re.compile(r"\bmonkeypatch\.setattr\(")
KINDS = {"mx.array", "np.ndarray"}
LIBRARIES = {"mx", "np"}
OF_TUPLES = "_replace"  # of a named tuple, where the underscore only avoids names of fields
ONE_OPERATION = "one mixer's operation: kernels, twin, native form and chooser"
PUBLIC = "public.py"  # what it imports is for users, with all members of its classes
LIBRARY = "a library that calls us reads it"
SEAMS = {  # name that only tests, scripts, users or libraries use: the reason
    "use_path": "tests compare the instruction sets of the native kernels",
    "invalidate": "tests and benchmarks read records again",
    "Request.api": "tests choose by it how an answer is written",
    "TokenLogprob.token_id": "tests compare it with the chosen token",
    "TokenizerWrapper.think_start": "mlx-lm's tokenizers have it",
    "TokenizerWrapper.think_end": "mlx-lm's tokenizers have it",
    **dict.fromkeys(("PatientProtocol.eof_received", "PatientProtocol.send_400_response"), LIBRARY),
    **dict.fromkeys(("Listener.capture_signals", "_Retries.filter", "_Words.special_token_ids"), LIBRARY),
    "VMStatistics._fields_": LIBRARY,
}
LONG = {  # module: why it is longer
    "driving/session.py": "one text: what is kept of it, and how a prompt goes on from that",
    "formats/record.py": "the one owner of offsets: of fields in a record, and of records in files",
    "experts/streamed.py": "one source of experts: turns, requests and memory share one lock",
    "mixers/delta/op.py": ONE_OPERATION,
    "model/decoder.py": "the whole model: what it computes of a token, of rows and of a span",
    "mixers/latent/op.py": ONE_OPERATION,
    "ops/experts.py": "the two kernels of a step's experts, one after the other: twins, native forms and choosers",
    "ops/native.py": "one function for each kernel of the one C extension, with the shapes that it takes",
}


def described(package: Path) -> set[str]:
    """The names of the classes that describe mixers."""
    trees = (ast.parse(file.read_text("utf-8")) for file in package.glob("mixers/*/spec.py"))
    return {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def lines_that_name(mixers: set[str], module: PurePath, tree: ast.Module) -> Iterator[str]:
    """Lines that name a mixer where none may be named; comments, docstrings and messages do not count."""
    if module.parts[0] in MAY_NAME:
        return
    for node in ast.walk(tree):
        if named := mixers & {getattr(node, key, 0) for key in ("id", "attr", "name")}:
            yield f"{module}:{node.lineno} names {named.pop()}"


def long_modules(lengths: dict[str, int], reasons: Iterable[str]) -> list[str]:
    """Modules of too many lines that have no reason, and reasons of other modules."""
    long = {module for module, lines in lengths.items() if lines > MODULE_LINES}
    return [
        *(f"{module} has {lengths[module]} lines" for module in sorted(long - set(reasons))),
        *(f"{module} needs no reason" for module in sorted(set(reasons) - long)),
    ]


def long_functions(module: PurePath, tree: ast.Module) -> Iterator[str]:
    """Functions of too many lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            length = (node.end_lineno or 0) - node.lineno + 1 - (text.count("\n") + 1 if text else 0)
            if length > FUNCTION_LINES:
                yield f"{module}:{node.lineno} {node.name} has {length} lines"


def public_functions(node: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions and methods whose name and whose class begin with no underscore."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and child.name[0] != "_":
            if isinstance(child, ast.ClassDef):
                yield from public_functions(child)
            else:
                yield child


def unnamed_types(module: PurePath, tree: ast.Module) -> Iterator[str]:
    """Public functions and methods with a bare `Any` in the signature, also in one that is a string."""
    for function in public_functions(tree):
        annotations = [one.annotation for one in ast.walk(function.args) if isinstance(one, ast.arg)]
        if any(one and UNNAMED.search(ast.unparse(one)) for one in [*annotations, function.returns]):
            yield f"{module}:{function.lineno} {function.name} has Any in its signature"


def drivers(module: PurePath, tree: ast.Module) -> Iterator[str]:
    """Calls that take a prompt or a step through a model."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and DRIVES.fullmatch(ast.unparse(node.func)):
            yield f"{module}:{node.lineno} calls {ast.unparse(node.func)}"


def askers(module: PurePath, tree: ast.Module) -> Iterator[str]:
    """Calls that ask again what lies in a model's directory."""
    for node in ast.walk(tree):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name in QUESTIONS and module.as_posix() not in ("packing/located.py", *QUESTIONS[name]):
            yield f"{module}:{node.lineno} asks {name} of a directory that is located"


def faults(package: Path, reasons: Iterable[str] = LONG) -> list[str]:
    """What is wrong with the package's shape."""
    found: list[str] = []
    lengths, mixers = {}, described(package)
    for file in sorted(package.rglob("*.py")):
        module, text = file.relative_to(package), file.read_text("utf-8")
        tree = ast.parse(text)
        found += lines_that_name(mixers, module, tree)
        found += [*long_functions(module, tree), *unnamed_types(module, tree), *askers(module, tree)]
        found += drivers(module, tree) if module != LOOP else ()
        lengths[module.as_posix()] = len(text.splitlines())
    return found + long_modules(lengths, reasons)


def asks_kind(node: ast.AST) -> bool:
    """Whether an expression asks whether an array is numpy's or MLX's: by its type, its library, or by name."""
    if isinstance(node, ast.Compare):
        return isinstance(node.ops[0], ast.Is | ast.IsNot) and ast.unparse(node.comparators[0]) in LIBRARIES
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func).rpartition(".")[2]
    types = {ast.unparse(one) for one in ast.walk(node.args[1])} if name == "isinstance" else set[str]()
    return name == "computes_at_once" or bool(types & KINDS)


def kind_places(package: Path) -> list[str]:
    """Where the package asks whether an array is numpy's or MLX's, besides `KIND`."""
    modules = {file.relative_to(package): file for file in sorted(package.rglob("*.py"))}
    return [
        f"{module}:{node.lineno} asks for the kind of an array"
        for module, file in modules.items()
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if module != KIND and asks_kind(node)
    ]


Names = list[tuple[int, str]]  # with their lines


def bound(node: ast.stmt) -> Names:
    """The names that a statement of a module or class defines; of a tuple only the last."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [(node.lineno, node.name)]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    last = [one.elts[-1] if isinstance(one, ast.Tuple) else one for one in targets]
    return [(node.lineno, one.id) for one in last if isinstance(one, ast.Name)]


def members(node: ast.ClassDef) -> Names:
    """The methods, fields and attributes of a class; those of tuples and of dictionaries with types may have no use."""
    if any(ast.unparse(base) in ("NamedTuple", "TypedDict") for base in node.bases):
        return []
    kept = (
        (one.lineno, one.attr)
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == "self"
    )
    return [*(name for one in node.body for name in bound(one)), *kept]


def reads(tree: ast.AST, without: str = "") -> Iterator[str]:
    """Names that are read as variables, besides the one that is defined."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id != without:
            yield node.id


def reads_elsewhere(tree: ast.Module) -> Iterator[str]:
    """Names that a module may read of others: attributes, imports, and strings that are a name or a type."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMES.fullmatch(node.value):
            yield from re.findall(r"\w+", node.value)


def unused(package: Path, seams: Iterable[str] = SEAMS) -> list[str]:
    """Names that nothing in the package uses, and seams that are none."""
    trees = {file.relative_to(package): ast.parse(file.read_text("utf-8")) for file in sorted(package.rglob("*.py"))}
    known = {name for tree in trees.values() for name in reads_elsewhere(tree)}
    public = set(reads_elsewhere(trees[Path(PUBLIC)])) if Path(PUBLIC) in trees else set()
    found: dict[str, str] = {}
    for module, tree in trees.items():
        here = {name for one in tree.body for name in reads(one, getattr(one, "name", ""))}
        defined = [("", line, name) for one in tree.body for line, name in bound(one) if name not in here]
        for one in ast.walk(tree):
            if isinstance(one, ast.ClassDef) and one.name not in public:
                defined += [(f"{one.name}.", line, name) for line, name in members(one)]
        for owner, line, name in defined:
            if name not in known and not (name.startswith("__") or name == "_"):
                found[owner + name if owner + name in seams else name] = f"{module}:{line} nothing uses {owner}{name}"
    needless = [f"{name} needs no reason: it is used, or gone" for name in seams if name not in found]
    return [text for name, text in found.items() if name not in seams] + needless


def definitions(tree: ast.Module) -> Iterator[str]:
    """The functions, classes, variables and attributes that a module defines, and what it imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            yield getattr(node, "attr", None) or getattr(node, "id", "")
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


def uses(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """The lines and names of attributes of objects that are not `own`, of imports and of calls of `setattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) not in own:
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and "setattr" in (getattr(node.func, "attr", 0), getattr(node.func, "id", 0)):
            yield from ((node.lineno, str(one.value)) for one in node.args[:2] if isinstance(one, ast.Constant))


def private_places(package: Path, tests: Path) -> list[str]:
    """Where tests reach for private names of the package, of which another module of the tests may have its own."""
    parsed = (ast.parse(file.read_text("utf-8")) for file in package.rglob("*.py"))
    private = {name for tree in parsed for name in definitions(tree) if PRIVATE.fullmatch(name)} - {OF_TUPLES}
    files = sorted(tests.rglob("*.py"))
    own = {"self", "cls", *(file.stem for file in files)}
    return [
        f"{file.relative_to(tests)}:{line} reaches for {match[1]}"
        for file in files
        for line, name in sorted(uses(ast.parse(file.read_text("utf-8")), own))
        if (match := PRIVATE.fullmatch(name)) and match[1] in private
    ]


def patches(tests: Path) -> dict[str, int]:
    """How often each file of the tests replaces a name, the most frequent first."""
    counts = {str(file.relative_to(tests)): len(PATCH.findall(file.read_text("utf-8"))) for file in tests.rglob("*.py")}
    return dict(sorted(((name, count) for name, count in counts.items() if count), key=lambda item: -item[1]))


if __name__ == "__main__":
    found = faults(PACKAGE) + unused(PACKAGE)
    places, kinds = private_places(PACKAGE, TESTS), kind_places(PACKAGE)
    if len(places) > PRIVATE_PLACES:
        found += [*places, f"tests reach for private names in {len(places)} places, more than {PRIVATE_PLACES}"]
    if len(kinds) > KIND_PLACES:
        found += [*kinds, f"code asks for the kind of an array in {len(kinds)} places, more than {KIND_PLACES}"]
    replaced = patches(TESTS)
    if sum(replaced.values()) > PATCHES:
        most = ", ".join(f"{name} {count}" for name, count in list(replaced.items())[:5])
        found.append(f"tests replace names in {sum(replaced.values())} places, more than {PATCHES}: {most}, ...")
    sys.exit("\n".join(found) if found else 0)
