"""`scripts/test --gpu`: its parts are all tests, each once, and it prints each failure when it happens."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

from conftest import AtOnce

TESTS = Path(__file__).parent
SCRIPT = TESTS.parent / "scripts" / "test"


def test_the_parts_are_all_tests_each_once():
    (function,) = re.findall(r"^gpu_parts\(\).*?^}", SCRIPT.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    run = subprocess.run(["bash", "-c", f"{function}; gpu_parts"], cwd=TESTS.parent, capture_output=True, text=True)
    folders = {path.parent for path in TESTS.glob("*/test_*.py")} | set(TESTS.glob("test_*.py"))
    assert sorted(run.stdout.split()) == sorted(str(path.relative_to(TESTS.parent)) for path in folders)


def test_a_failure_is_printed_when_it_happens():
    lines = []
    terminal = SimpleNamespace(write_line=lines.append)
    at_once = AtOnce(SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=lambda name: terminal)))
    for failed in (True, False):
        at_once.pytest_runtest_logreport(SimpleNamespace(failed=failed, nodeid="a", when="call", longreprtext="why"))
    assert lines == ["\na (call)\nwhy"]
