"""Generators that clean up when they are closed: their users close them explicitly.

A Python may end a closed generator without freeing its frame (CPython 3.12.3, Ubuntu 24.04's, does): the generator over
which it was iterating then stays suspended, and its `finally` does not run, until the closed generator itself is
dropped.
"""

import ast
import functools
from collections import deque
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "moeflux_mlx"
MODULES = {str(file.relative_to(PACKAGE)): file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}
CLOSERS = {"closing", "finished", "as_share"}
SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


@functools.cache
def inside(node):
    """Yields the nodes inside `node`, except those of the functions and classes in it."""
    nodes, children = [], deque(ast.iter_child_nodes(node))
    while children:
        child = children.popleft()
        if not isinstance(child, SCOPES):
            nodes.append(child)
            children += ast.iter_child_nodes(child)
    return nodes


def name_of(node):
    """Returns the name that a call calls, without what is before its last dot."""
    called = node.func
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def cleans_up(function):
    """Returns whether it is a generator that does something when it is closed."""
    yields = {node for node in inside(function) if isinstance(node, ast.Yield | ast.YieldFrom)}
    if not yields or any("contextmanager" in ast.unparse(decorator) for decorator in function.decorator_list):
        return False
    guards = [node for node in inside(function) if isinstance(node, ast.With) or getattr(node, "finalbody", None)]
    return any(yields.intersection(inside(guard)) for guard in guards)


@functools.cache
def handed_on(function):
    """Returns the calls whose results a function returns, or yields completely."""
    ends = [node.value for node in inside(function) if isinstance(node, ast.Return | ast.YieldFrom)]
    handed = [end for end in ends if end and not isinstance(end, SCOPES)]
    return [node for end in handed for node in [end, *inside(end)] if is_call(node) and node not in in_closers(end)]


def in_closers(node):
    """Returns the arguments of calls of functions that close a generator when they end."""
    return [argument for one in [node, *inside(node)] if is_call(one, CLOSERS) for argument in one.args]


def is_call(node, names=None):
    return isinstance(node, ast.Call) and (names is None or name_of(node) in names) and not is_namesake(node)


def is_namesake(node):
    """Whether it calls `advance` of a cache, which is no generator as that of a model is."""
    return name_of(node) == "advance" and not ast.unparse(node.func).removesuffix(".advance").endswith("model")


def left_open(function, names):
    """Returns the generators that clean up and that `function` neither closes nor returns."""
    nodes, handed = inside(function), handed_on(function)
    made = [node for node in nodes if is_call(node, names) and node not in handed]
    if not made:
        return []
    closed = {ast.unparse(argument) for node in nodes if is_call(node, CLOSERS) for argument in node.args}
    closed |= {ast.unparse(node.func.value) for node in nodes if is_call(node, {"close"})}
    bound = {node.value: ast.unparse(node.targets[0]) for node in nodes if isinstance(node, ast.Assign)}
    return [text for call in made if not {text := ast.unparse(call), bound.get(call)} & closed]


def findings(modules):
    """Returns (module, function, call) of generators that clean up and are left open.

    Private names are looked up in their module only.
    """
    functions = {
        module: [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        for module, text in modules.items()
    }
    names = {module: {one.name for one in of if cleans_up(one)} for module, of in functions.items()}
    before = None
    while names != before:
        before = {module: set(of) for module, of in names.items()}
        public = {name for of in names.values() for name in of if not name.startswith("_")}
        for module, of in functions.items():
            names[module] |= public
            names[module] |= {one.name for one in of if any(is_call(c, names[module]) for c in handed_on(one))}
    return [
        (module, one.name, call)
        for module, of in functions.items()
        for one in of
        for call in left_open(one, names[module])
    ]


def test_generators_that_clean_up_are_closed():
    assert findings(MODULES) == []


CLEANS_UP = "def numbers():\n    try:\n        yield 1\n    finally:\n        end()\n"


@pytest.mark.parametrize(
    "user, opened",
    [
        ("for one in numbers(): yield one", ["numbers()"]),
        ("every = numbers()\n    for one in every: print(one)", ["numbers()"]),
        ("for one in map(str, numbers()): yield one", ["numbers()"]),
        ("with closing(numbers()) as every:\n        for one in every: yield one", []),
        ("every = numbers()\n    with closing(every):\n        for one in every: yield one", []),
        ("every = numbers()\n    try:\n        yield next(every)\n    finally:\n        every.close()", []),
        ("yield from numbers()", []),
        ("return numbers()", []),
    ],
)
def test_faults_are_found(user, opened):
    text = f"{CLEANS_UP}def user():\n    {user}\n"
    assert [call for _, _, call in findings({"": text})] == opened
