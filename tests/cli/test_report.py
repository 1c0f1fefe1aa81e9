"""The report about a machine: its parts, faults that are planted in it, and what it must not hold."""

import itertools
import platform
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import child_environment

from metal import msl
from moeflux_mlx import doctor
from moeflux_mlx.cli import diagnosis, known_models, reporting, soak
from moeflux_mlx.cli.known_models import Fit
from moeflux_mlx.opening.kernel_cache import threads_allowed
from moeflux_mlx.opening.launches import launches_of
from moeflux_mlx.opening.random_weights import Shapes
from moeflux_mlx.ops.kernel_files import Program
from moeflux_mlx.ops.launch import KernelText
from moeflux_mlx.ops.tiles import CODE, TRIED, Tiles, merged
from moeflux_mlx.tools import kernels
from moeflux_mlx.tools.kernels import Built, programs_of_variants

VARIANT = "qwen3-30b-a3b"
TITLES = ["machine", "threads and matrix units", "values", "memory", "layers", "known models", "kernels", "demo model"]
TITLES += ["pools"]


class OnlyCompiled(msl.TextKernel):
    """Compiles, and then refuses the launch as MLX does for Metal. `limits`: threads allowed, by a part of a name."""

    limits: dict[str, int] = {}

    def __init__(self, **definition):
        super().__init__(**definition)
        self.name = definition["name"]

    def __call__(self, *, threadgroup, **call):
        try:
            super().__call__(threadgroup=threadgroup, **call)
        except msl.Failure as error:
            raise RuntimeError(f"[metal::Device] Unable to build metal library from source\n{error}") from None
        allowed = next((limit for part, limit in self.limits.items() if part in self.name), 1024)
        assert threadgroup[0] > 1024, "it would run"
        words = f"Thread group size ({threadgroup[0]}) is greater than  the maximum allowed threads per threadgroup"
        raise ValueError(f"{words} ({allowed}).")


@pytest.fixture(autouse=True)
def short(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("kept")))
    monkeypatch.setattr(diagnosis, "ROUNDS", 1)
    monkeypatch.setattr(diagnosis, "ANSWER", 8)
    monkeypatch.setattr(soak, "compared", lambda: (["as fast"], True))  # test_soak.py runs it
    monkeypatch.delenv("CI", raising=False)


def reduce(patch, *titles):
    """Reduces the report to the parts with these titles."""
    whole = diagnosis.Facts.table
    patch.setattr(
        diagnosis.Facts,
        "table",
        lambda self, *given, **named: {title: whole(self, *given, **named)[title] for title in titles},
    )


@pytest.fixture
def viewed(monkeypatch, cpu_device):
    """Gives doctor a Metal compiler and one known model; the report has its kernels alone."""
    monkeypatch.setattr(diagnosis, "known_models", lambda here: [Fit(VARIANT, None, 0)])
    monkeypatch.setattr(known_models, "product_rate", lambda dtype: 1e9)
    monkeypatch.setattr(diagnosis, "machine_figures", lambda: None)
    monkeypatch.setattr(kernels, "SEQUENCES", ())
    monkeypatch.setattr(kernels, "CHECKED", ())
    reduce(monkeypatch, "kernels")
    OnlyCompiled.limits.clear()
    with msl.launching(OnlyCompiled):
        yield


def report(tmp_path, *options, code=0):
    """Returns the file's text."""
    path = tmp_path / "sent.txt"
    assert doctor.main(["--no-disk", "--report", str(path), *options]) == code
    return path.read_text()


def test_every_part_is_in_the_file_and_on_the_screen(tmp_path, capsys):
    text = report(tmp_path)
    assert capsys.readouterr().out == text
    assert [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")] == TITLES
    assert text.count("right (0.062 expected)") == 2 and "streaming gives the same bits" in text
    assert text.count("    512 ") == 2 and re.search(r"\n(everything|what ran) is right(; \d+ .* left out)?\n$", text)


@msl.needed
def test_every_text_of_a_model_is_compiled_and_none_runs(viewed, tmp_path):
    text = report(tmp_path)
    shapes = Shapes.of_variant(VARIANT, mx.bfloat16)
    choices = (CODE, Tiles(merged(TRIED["metal"])))
    listed = {
        one.kernel.name for tiles in choices for step in launches_of(shapes, "metal", tiles) for one in step.programs
    }
    compiled = {name for name in listed if any(f"custom_kernel_{name}_" in one for one in msl.TextKernel.texts)}
    assert len(listed) > 15 and compiled == listed
    assert f"{len(msl.TextKernel.texts)} of {len(msl.TextKernel.texts)} texts of 1 models" in text
    assert "\n  attend_step: " in text and "/1024" in text and "; 0 failed" in text


@msl.needed
def test_a_kernel_that_does_not_compile_is_a_fault(viewed, monkeypatch, tmp_path):
    msl.plant(monkeypatch, "topk.metal", ";\n", ";\nundeclared += 1;\n")
    text = report(tmp_path, code=1)
    assert "FAILED moeflux_topk_" in text and "undeclared" in text and "WRONG OR FAILED: kernels" in text
    assert str(msl.BUILD) not in text


@msl.needed
def test_a_kernel_that_allows_too_few_threads_is_a_fault(viewed, tmp_path):
    OnlyCompiled.limits["expert_down_combine"] = 32
    text = report(tmp_path, code=1)
    assert "FAILED moeflux_expert_down_combine" in text and "and 32 are allowed" in text


def test_texts_that_only_tune_chooses_come_first(cpu_device):
    names = [VARIANT, "qwen3.6-35b-a3b"]
    programs = list(programs_of_variants(names, "metal", mx.bfloat16))
    for word in ("simdgroup_multiply_accumulate", "affine4_halves", "moeflux_expert_places"):
        places = [
            i for i, one in enumerate(programs) if word in one.kernel.name + one.kernel.header + one.kernel.source
        ]
        assert places and places[-1] < len(programs) / 2
    keys = {one.key for one in programs}
    for name in names:
        steps = launches_of(Shapes.of_variant(name, mx.bfloat16), "metal")
        assert keys >= {program.key for step in steps for program in step.programs}


@msl.needed
def test_small_inputs_are_as_small_as_the_launch_has_them(viewed):
    """MLX passes them as `constant`, so that another text is compiled."""
    texts = []
    for program in programs_of_variants([VARIANT], "metal", mx.bfloat16):
        threads_allowed(program)
        texts.append((any(program.few), "const constant" in msl.TextKernel.texts[-1]))
    assert {(True, True), (False, False)} == set(texts)


@msl.needed
def test_a_call_that_mlx_refuses_otherwise_is_no_limit(viewed):
    wrong = Program(KernelText("two", ["x"], ["y"], "", "y[0] = x[0];"), [], [mx.float32])
    with pytest.raises(ValueError, match="inputs"):
        threads_allowed(wrong)


def test_a_virtual_gpu_is_said_to_be_one(monkeypatch, kernels_are):
    """As GitHub's Macs name it. What identifies a machine is left out."""
    found = {"device_name": "Apple Paravirtual device", "architecture": "air64_v27", "memory_size": 7, "uuid": "abc"}
    monkeypatch.setattr(diagnosis.mx, "device_info", lambda: found)
    kernels_are(True)
    monkeypatch.setattr(diagnosis, "machine_figures", lambda: None)
    monkeypatch.setattr(diagnosis, "machine_lines", lambda figures: [])
    lines, is_right = diagnosis.Facts(None).machine()
    assert lines[0] == "device    architecture air64_v27, memory_size 7" and is_right
    assert "times say nothing of a Mac" in lines[1] and "abc" not in str(lines)


def test_kernels_beyond_the_time_are_counted():
    lines = diagnosis.kernel_lines([Built("moeflux_topk_64_0123456789abcdef", 0.5, 64, 512)], 7, 2, 120.0)
    assert lines[0] == "1 of 7 texts of 2 models, 0.5 s of compiling, the slowest in 0.50 s; 0 failed"
    assert lines[1] == "6 were left out, because 120 s were over" and lines[-1] == "topk: 500/512"


@pytest.fixture
def listed(viewed, monkeypatch):
    """Lists eight kernels, slowly, of which no compiler knows anything."""

    def slowly(*given):
        time.sleep(0.6)
        return [Program(KernelText(f"k{i}", [], ["y"], "", ""), [], [mx.float32]) for i in range(8)]

    monkeypatch.setattr(diagnosis, "programs_of_variants", slowly)
    monkeypatch.setattr(kernels, "compiler_of", lambda target: lambda program: None)
    monkeypatch.setattr(diagnosis, "BUDGET", 0.5)


@msl.needed
def test_listing_takes_nothing_from_the_time_to_compile(listed, tmp_path):
    assert "8 of 8 texts" in report(tmp_path)


@msl.needed
def test_kernels_that_are_left_out_are_said_at_the_end(listed, monkeypatch, tmp_path):
    monkeypatch.setattr(diagnosis, "BUDGET", -1.0)
    text = report(tmp_path)
    assert text.endswith("\nwhat ran is right; 8 kernels were left out\n") and "everything is right" not in text
    monkeypatch.setenv("CI", "true")
    assert report(tmp_path).endswith("\neverything is right\n")


@msl.needed
def test_cudas_kernels_are_compiled_together(listed, monkeypatch, tmp_path):
    """Each waits for another one."""
    together = threading.Barrier(2, timeout=5)
    monkeypatch.setattr(kernels, "compiler_of", lambda target: lambda program: together.wait() and None)
    monkeypatch.setattr(kernels.os, "cpu_count", lambda: 2)
    with monkeypatch.context() as patched:
        patched.setattr(diagnosis.backend, "name", lambda: "cuda")
        text = report(tmp_path)
    assert "8 of 8 texts" in text and "; 0 failed" in text


def rows_are(patch, nats, *last):
    """Gives the demo model's story these nats a token, and rows that end with these values in turn."""
    values = itertools.cycle(last or [0])
    patch.setattr(diagnosis, "story_rows", lambda engine: (np.array([0.0, 0.0, next(values)]), nats))


def test_a_wrong_model_is_seen(monkeypatch, tmp_path):
    rows_are(monkeypatch, 1.4)
    reduce(monkeypatch, "demo model")
    text = report(tmp_path, code=1)
    assert "1.400 nats a token, WRONG" in text and text.endswith("WRONG OR FAILED: demo model\n")


def test_other_bits_of_streaming_are_seen(monkeypatch, tmp_path):
    rows_are(monkeypatch, diagnosis.NATS, 0, 1e-7)
    reduce(monkeypatch, "demo model")
    assert "streaming gives OTHER BITS" in report(tmp_path, code=1)


def test_a_part_that_fails_is_a_line_and_the_others_follow(monkeypatch, tmp_path):
    def broken(self):
        raise OSError(2, "cannot read", "/Users/ann/secret/model")

    monkeypatch.setattr(diagnosis.Facts, "memory", broken)
    reduce(monkeypatch, "memory", "values")
    text = report(tmp_path, code=1)
    assert "memory:\n  failed: FileNotFoundError: [Errno 2] cannot read: 'PATH'" in text
    assert "values    product   right" in text and "WRONG OR FAILED: memory" in text


def test_a_crash_leaves_what_there_is(monkeypatch, tmp_path):
    monkeypatch.setattr(diagnosis.Facts, "demo", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    reduce(monkeypatch, "values", "demo model")
    text = report(tmp_path, code=130)
    assert "values    product   right" in text and text.endswith(
        "demo model: began, and the program ended before it did\n"
    )


def test_nothing_private_is_in_the_file(tmp_path):
    """Runs with a home, a user and keys of its own; a broken part names all of them."""
    home = tmp_path / "Users" / "Ann Bell"
    home.mkdir(parents=True)
    secrets = {"HF_TOKEN": "hf_abcdefgh123", "OPENAI_API_KEY": "sk-12345678"}
    environment = {**child_environment(), **secrets, "HOME": str(home), "USER": "annabel"}
    script = """
import os, platform, sys
import numpy as np
from moeflux_mlx import doctor
from moeflux_mlx.cli import diagnosis, soak
from moeflux_mlx.cli.known_models import Fit

def broken(self):
    raise OSError(f"{os.environ['HF_TOKEN']} of {os.environ['USER']} on {platform.node()}, {os.getcwd()}/x, "
                  f"{sys.prefix} {os.environ['HOME']}/a model {os.environ['OPENAI_API_KEY']} file:///var/x:1")

diagnosis.Facts.memory = broken
diagnosis.known_models = lambda here: [Fit("qwen3-30b-a3b", None, 0)]
diagnosis.story_rows = lambda engine: (np.zeros(3), diagnosis.NATS)
diagnosis.ROUNDS, diagnosis.ANSWER = 1, 8
soak.compared = lambda: broken(None)
sys.exit(doctor.main(["--no-disk", "--report"]))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=home, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    text = (home / reporting.FILE).read_text()
    assert "failed: OSError: SECRET of NAME on NAME" in text and text == done.stdout
    private = [
        *secrets.values(),
        "annabel",
        "Ann",
        "Bell",
        platform.node(),
        str(tmp_path),
        sys.prefix,
        "/var",
        "/Users",
    ]
    assert [word for word in private if word in text] == []


SPACED = {
    "no '/proc/Ann Bell/my models' here": "no 'PATH' here",
    'cannot read "/x/Ann\'s/my models", 3.07 GB/s': 'cannot read "PATH", 3.07 GB/s',
    "at /Volumes/My Drive/models": "at PATH",
    "/Volumes/A Very Big Drive/my models/x: gone, 3 of 4": "PATH: gone, 3 of 4",
    "in ~/Secret Project/x, or ~ann/y": "in PATH, or PATH",
    "on /Volumes/Ann's Drive with spaces has 1 GB": "on PATH has 1 GB",
    "see /Volumes/Hub Of Ann": "see PATH",
}


@pytest.mark.parametrize("text", SPACED)
def test_a_path_with_spaces_is_taken_out_as_a_whole(text, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/Volumes/Hub Of Ann")
    place = Path("/Volumes/Ann's Drive with spaces")
    assert reporting.without_names(text, [place]) == SPACED[text]


def test_a_folder_that_is_given_is_taken_out_as_a_whole(monkeypatch, tmp_path):
    """It is given as a relative path, and its message does not quote it."""

    def full(place):
        raise OSError(f"{place} is full")

    monkeypatch.chdir(tmp_path)
    reduce(monkeypatch, "disk")
    monkeypatch.setattr(diagnosis, "disk_rate", full)
    assert doctor.main(["--directory", "my own models", "--report", "sent.txt"]) == 0
    assert "not measured: PATH is full" in Path("sent.txt").read_text()


def test_words_of_the_report_stay_whatever_the_account_is_called(monkeypatch):
    text = "[metal::Device] Apple M4 Max, max 3; mac test dev pro ultra topk: 500/512 memory"
    for name in ("max", "metal", "test", "mac", "dev", "pro", "topk", "memory", "Apple"):
        monkeypatch.setenv("USER", name)
        monkeypatch.setattr(reporting.platform, "node", lambda name=name: f"{name}.local")
        assert reporting.without_names(text) == text
        assert reporting.without_names(f"on {name}.local") == "on NAME"


def test_secrets_are_whole_words_of_some_length(monkeypatch):
    monkeypatch.setenv("MY_KEY", "metal_k")
    monkeypatch.setenv("MY_TOKEN", "abcdefg==")
    assert (
        reporting.without_names("metal_k metal_kernel xabcdefg== abcdefg==") == "metal_k metal_kernel xabcdefg== SECRET"
    )


def test_figures_are_not_taken_for_paths():
    text = "3.07 GB/s; 31/256 28/1024; Linux-6.18/x; a/b"
    assert reporting.without_names(text) == text


def test_a_report_does_not_list_launches(capsys):
    assert doctor.main(["--report", "x", "--launches"]) == 1
    assert "exclude each other" in capsys.readouterr().err and not Path("x").exists()


def test_nvidias_compiler_is_named_if_it_is_missing(monkeypatch):
    monkeypatch.setattr(kernels, "compiler_here", lambda: None)
    with pytest.raises(RuntimeError, match="NVIDIA's compiler"):
        kernels.compiler_of("cuda")
    failing = type("Nvrtc", (), {"compile": lambda self, program: None})
    monkeypatch.setattr(kernels, "compiler_here", failing)
    one = kernels.built(Program(KernelText("k", [], ["y"], "", ""), [], [mx.float32]), kernels.compiler_of("cuda"))
    assert one.fault == "it does not compile" and one.allowed is None


def test_a_report_that_cannot_be_written_is_refused_at_once(tmp_path, capsys):
    assert doctor.main(["--report", str(tmp_path / "absent" / "x.txt")]) == 1
    out, err = capsys.readouterr()
    assert err == (
        f"error: --report is {tmp_path}/absent/x.txt, and there is no directory {tmp_path}/absent; make it first\n"
    )
    assert not out
