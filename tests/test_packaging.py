"""Kernel sources, configurations and the demo model are found in a wheel made from the sdist, and in an editable
install.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import child_environment, on_cpu, tiny_directory

from moeflux_mlx import installation
from moeflux_mlx.files import directory
from moeflux_mlx.generate.__main__ import main
from moeflux_mlx.spec import variants
from moeflux_mlx.version import FILE, VERSION

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("pyproject.toml", "setup.py", "LICENSE", "README.md", "moeflux_mlx", "metal", "configs", "native")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Builds a wheel from an sdist of a copy of the tree, without a compiler, so that it is quick."""
    base = tmp_path_factory.mktemp("packaging")
    (base / "tree").mkdir()
    for name in SHIPPED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, base / "tree" / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, base / "tree" / name)
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=base / "tree", check=True)
    build = "import setuptools.build_meta as b, sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"
    no_compiler = {**os.environ, "CC": "false"}

    def run(hook, folder):
        command = [sys.executable, "-c", build, hook, str(base)]
        done = subprocess.run(command, cwd=folder, env=no_compiler, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return base / done.stdout.strip().splitlines()[-1]

    sdist = run("build_sdist", base / "tree")
    with tarfile.open(sdist) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.11.4
        archive.extractall(base / "sdist", **safely)
    (unpacked,) = (base / "sdist").iterdir()
    return run("build_wheel", unpacked)


def data_files():
    for name in ("metal", "configs", "demo"):
        folder = directory(name)
        yield from (f"moeflux_mlx/{name}/{f.relative_to(folder)}" for f in folder.rglob("*") if f.is_file())


COMPILER = """#!/bin/sh
# Writes what it is asked for, and the name of each source; a source waits until a second one has begun.
for word; do case $last in -o) out=$word ;; esac; case $word in native/*.c) source=$word ;; esac; last=$word; done
[ -z "$source" ] || { echo "$source" >>"$COMPILED"; for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  [ "$ALONE" ] || [ "$(wc -l <"$COMPILED")" -gt 1 ] && break; sleep 0.5; [ $i = 20 ] && exit 1; done; }
: >"$out"
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor compiles one file at a time")
def test_sources_compile_in_parallel_and_once(tmp_path):
    """Also where pip builds in a temporary folder, as it does for each further extra."""
    for name in ("setup.py", "native"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    for folder in ("ops", "experts"):
        (tmp_path / "moeflux_mlx" / folder).mkdir(parents=True)
    compiler, log = tmp_path / "compiler", tmp_path / "compiled"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)

    def compiled(**environment):
        """Returns the sources that a build compiles."""
        log.write_text("")
        command = [sys.executable, "setup.py", "build", "--build-base", tempfile.mkdtemp(dir=tmp_path)]
        environment = {**os.environ, "CC": str(compiler), "COMPILED": str(log), **environment}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and "failed" not in done.stderr, done.stderr
        return sorted(Path(source).name for source in log.read_text().split())

    first = compiled()
    assert {"avx512.c", "native.c", "portable.c"} < set(first) and len(set(first)) == len(first)
    assert compiled() == []
    later = time.time() + 9
    os.utime(tmp_path / "native" / "native.c", (later, later))
    assert compiled(ALONE="1") == ["native.c"]
    assert len(compiled(CFLAGS="-O0")) == len(first)


def test_the_sdist_has_every_native_source(wheel):
    sdist = next(wheel.parent.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        packed = {Path(name).name for name in archive.getnames() if "/native/" in name}
    assert {file.name for file in (ROOT / "native").iterdir() if file.name != "reads.c"} <= packed


def test_a_wheel_made_from_the_sdist_has_all_data(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = set(data_files())
    assert len(wanted) > 15 and wanted | {"moeflux_mlx/server/page/index.html"} <= names


def test_a_wheel_has_the_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        assert "\nLicense-Expression: MIT AND PSF-2.0\n" in archive.read(metadata).decode()
        for name in ("LICENSE", "moeflux_mlx/calibration/text/LICENSE-PYTHON.txt"):
            licence = archive.read(metadata.replace("METADATA", f"licenses/{name}"))
            assert licence == (ROOT / name).read_bytes()
        assert "moeflux_mlx/calibration/text/chat.json" in archive.namelist()


def test_a_wheel_knows_the_commit_that_its_sdist_was_made_from(wheel, tmp_path):
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(command, cwd=wheel.parent / "tree", capture_output=True, text=True, check=True).stdout
    zipfile.ZipFile(wheel).extractall(tmp_path)
    said = subprocess.run(
        [sys.executable, "-m", "moeflux_mlx", "--version"], cwd=tmp_path, env=child_environment(tmp_path),
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert said == f"moeflux-mlx {VERSION} ({commit.strip()})\n"
    (tmp_path / "moeflux_mlx" / FILE).unlink()
    (tmp_path / ".git").mkdir()
    said = subprocess.run(
        [sys.executable, "-m", "moeflux_mlx", "--version"], cwd=tmp_path, env=child_environment(tmp_path),
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert said == f"moeflux-mlx {VERSION}\n", "a tree that git does not know"


def test_the_formula_is_that_of_the_sdist(wheel):
    (sdist,) = wheel.parent.glob("*.tar.gz")
    formula = subprocess.run([ROOT / "scripts/homebrew/formula", sdist], capture_output=True, text=True, check=True)
    assert f'sha256 "{hashlib.sha256(sdist.read_bytes()).hexdigest()}"' in formula.stdout
    assert f"/moeflux_mlx-{VERSION}.tar.gz" in formula.stdout and sdist.name == f"moeflux_mlx-{VERSION}.tar.gz"
    if shutil.which("ruby"):
        subprocess.run(["ruby", "-c"], input=formula.stdout, text=True, check=True, capture_output=True)


def test_this_version_has_a_section_of_the_changelog():
    assert f"\n## {VERSION}\n" in (ROOT / "CHANGELOG.md").read_text()


def python_at_hand(version):
    """Returns an interpreter of this version that can make environments, of pyenv or on the PATH, or None."""
    found = [*Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), shutil.which(f"python{version}")]
    makes = [
        python
        for python in found
        if python and not subprocess.run([python, "-c", "import venv, pip"], stderr=subprocess.DEVNULL).returncode
    ]
    return next(iter(makes), None)


@pytest.mark.full
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_what_pip_installs_runs_without_a_compiler(version, wheel, tmp_path):
    """Builds the wheel of this version and tries it. The test needs a package index."""
    python = python_at_hand(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    (sdist,) = wheel.parent.glob("*.tar.gz")
    command = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, sdist]
    subprocess.run(command, check=True)
    (built,) = tmp_path.glob("*.whl")
    tried = subprocess.run([ROOT / "scripts" / "try_wheel", built, python], capture_output=True, text=True)
    assert tried.returncode == 0, tried.stderr
    assert tried.stdout.startswith(f"moeflux-mlx {VERSION} (") and "Once" in tried.stdout


def test_an_installed_wheel_finds_its_data(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "from moeflux_mlx.spec import variants; from moeflux_mlx.files import directory;"
        "import moeflux_mlx; print(moeflux_mlx.__file__, len(variants()), (directory('metal') / 'qmv.metal').exists(),"
        "(directory('demo') / 'config.json').exists())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=child_environment(tmp_path),
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert out[0].startswith(str(tmp_path)) and out[1:] == [str(len(variants())), "True", "True"]


def test_the_demo_model_is_small():
    assert sum(file.stat().st_size for file in directory("demo").rglob("*")) < 8_000_000


def test_without_a_backend_the_extra_is_named(tmp_path):
    """Checks the state that `pip install .` leaves on Linux: the package mlx alone has no engine."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "core.py").write_text("raise ImportError('libmlx.so: cannot open shared object file')")
    for words in (["-m", "moeflux_mlx", "generate", "--help"], ["-c", "from moeflux_mlx import load"]):
        done = subprocess.run([sys.executable, *words], env=child_environment(tmp_path), capture_output=True, text=True)
        last = done.stderr.strip().splitlines()[-1]
        assert done.returncode == 1 and "rror: MLX cannot be imported (libmlx.so" in last
        assert "pip install 'mlx[cpu]', or 'mlx[cuda13]'" in last and "extras [cpu] and [cuda13]" in last


@pytest.fixture
def installed(monkeypatch):
    """Returns a function that says as what this package is installed, if it is."""
    return lambda found: monkeypatch.setattr(installation.metadata, "distributions", lambda name: found)


@pytest.mark.parametrize(
    "origin, command",
    [
        ({"url": "file:///home/a%20b/moeflux", "dir_info": {}}, "'/home/a b/moeflux'"),
        ({"url": "file:///tmp/moeflux.whl", "archive_info": {}}, "/tmp/moeflux.whl"),
        ({"url": "https://host/m.git", "vcs_info": {"vcs": "git", "commit_id": "1"}}, "git+https://host/m.git"),
        (None, None),
    ],
)
def test_the_package_is_reinstalled_from_its_own_folder(origin, command, monkeypatch, installed):
    class Installed:
        def read_text(self, name):
            assert name == "direct_url.json"
            return None if origin is None else json.dumps(origin)

    installed([Installed()])
    assert installation.reinstall_command().endswith(f" -e {ROOT}"), "whoever runs the source tree must build in it"
    monkeypatch.setattr(installation, "__file__", "/usr/lib/site-packages/moeflux_mlx/installation.py")
    reinstall = installation.reinstall_command()
    if command is None:
        assert "from where it came" in reinstall
    else:
        assert reinstall == f"pip install --force-reinstall --no-deps --no-cache-dir {command}"


def test_an_extra_is_installed_by_the_names_of_its_packages(installed):
    """The name of this package is on no index."""
    wanted = ["numpy>=1", 'uvicorn>=0.40; extra == "server"', 'starlette>=1; extra == "server"']
    installed([SimpleNamespace(requires=wanted)])
    assert installation.install_command("server") == "pip install 'uvicorn>=0.40' 'starlette>=1'"
    assert installation.install_command("newer") == f"pip install -e '{ROOT}[newer]'"
    installed([])
    assert installation.install_command("server") == f"pip install -e '{ROOT}[server]'"


def test_a_command_without_native_kernels_says_so_in_one_line(no_extension, capsys):
    with on_cpu():
        assert main(["--model", str(tiny_directory("qwen3_moe")), "-p", "a", "-m", "1"]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "native" in line]
    assert line.startswith("warning: the native CPU kernels are not built") and installation.reinstall_command() in line


def test_a_misspelt_backend_is_named(tmp_path):
    done = subprocess.run(
        [ROOT / "scripts" / "demo"], env={**os.environ, "MOEFLUX_BACKEND": "cuda"}, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr == "error: MOEFLUX_BACKEND is cuda; expected cpu or cuda13\n"


def test_an_old_python_is_one_line(tmp_path):
    for name in ("python3", "python3.13", "python3.12", "python3.11", "python3.10"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scripts").mkdir()
    for name in ("demo", "environment.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHON")}
    environment["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    done = subprocess.run([tmp_path / "scripts" / "demo"], env=environment, capture_output=True, text=True)
    needed = "error: Python 3.10 or newer is needed"
    assert done.returncode == 1 and done.stderr == f"{needed}; set PYTHON to one\n"
    named = environment | {"PYTHON": "no-such", "PATH": os.environ["PATH"]}
    done = subprocess.run([tmp_path / "scripts" / "demo"], env=named, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == f"{needed}, and PYTHON is no-such; set PYTHON to one\n"
    (tmp_path / "python").symlink_to("python3")
    active = environment | {"VIRTUAL_ENV": str(tmp_path)}
    done = subprocess.run([tmp_path / "scripts" / "demo"], env=active, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == f"{needed}; the one of {tmp_path} is older\n"


def test_the_demo_takes_the_callers_paths(tmp_path):
    """Checks relative paths too: the script itself works in the repository."""
    shutil.copytree(tiny_directory("qwen3_moe"), tmp_path / "tiny")
    environment = {**os.environ, "VIRTUAL_ENV": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$2" = moeflux_mlx.generate ] || exit 0\npwd; echo "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts" / "demo", "--model", "tiny"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}\n-m moeflux_mlx.generate --model tiny\n"
