"""Kernel sources, configurations and the demo model are found in a wheel made from the sdist, and when editable."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from moeflux_mlx.resources import directory

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("pyproject.toml", "setup.py", "README.md", "moeflux_mlx", "metal", "configs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from an sdist of a copy of the tree, without a compiler, so that it is quick."""
    base = tmp_path_factory.mktemp("packaging")
    (base / "tree").mkdir()
    for name in SHIPPED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, base / "tree" / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, base / "tree" / name)
    build = "import setuptools.build_meta as b, sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"
    no_compiler = {**os.environ, "CC": "false"}

    def run(hook, folder):
        command = [sys.executable, "-c", build, hook, str(base)]
        done = subprocess.run(command, cwd=folder, env=no_compiler, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return base / done.stdout.strip().splitlines()[-1]

    sdist = run("build_sdist", base / "tree")
    with tarfile.open(sdist) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4
        archive.extractall(base / "sdist", **safely)
    (unpacked,) = (base / "sdist").iterdir()
    return run("build_wheel", unpacked)


def data_files():
    for name in ("metal", "configs", "demo"):
        folder = directory(name)
        yield from (f"moeflux_mlx/{name}/{f.relative_to(folder)}" for f in folder.rglob("*") if f.is_file())


def test_a_wheel_made_from_the_sdist_has_all_data(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = set(data_files())
    assert len(wanted) > 15 and wanted <= names


def test_an_installed_wheel_finds_its_data(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "from moeflux_mlx.config import variants; from moeflux_mlx.resources import directory;"
        "import moeflux_mlx; print(moeflux_mlx.__file__, len(variants()), (directory('metal') / 'qmv4.metal').exists(),"
        "(directory('demo') / 'config.json').exists())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert out[0].startswith(str(tmp_path)) and out[1:] == ["8", "True", "True"]


def test_the_demo_model_is_small():
    assert sum(file.stat().st_size for file in directory("demo").rglob("*")) < 8_000_000
