"""The screen that says what a machine is and can run."""

import pytest

from moeflux_mlx import doctor
from moeflux_mlx.cli import diagnosis
from moeflux_mlx.spec import variants


@pytest.fixture(autouse=True)
def small_file(monkeypatch):
    monkeypatch.setattr(diagnosis, "MEASURED_FILE", 8 << 20)


def test_the_screen_names_machine_values_disk_and_models(tmp_path, capsys):
    assert doctor.main(["--directory", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert all(out.count(f"\n{word}") == 1 for word in ("versions ", "runs on ", "memory ", "values ", "disk "))
    assert "GB/s reading whole experts" in out and all(f"\n{name} " in out for name in variants())
    assert list(tmp_path.iterdir()) == [], "the measured file is gone"


def test_a_wrong_value_is_said_and_ends_in_an_error(monkeypatch, capsys):
    right = diagnosis.check_operations
    wrong = diagnosis.check_operations.__globals__["Check"]("experts", 0.7, 1e-4, 0.1)
    monkeypatch.setattr(diagnosis, "check_operations", lambda dtype: [*right(dtype), wrong])
    assert doctor.main(["--no-disk"]) == 1
    out = capsys.readouterr().out
    assert "WRONG: error 7.0e-01" in out and "please report" in out and "\ndisk" not in out


def test_a_disk_without_room_is_not_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(diagnosis, "MEASURED_FILE", 1 << 60)
    assert doctor.main(["--directory", str(tmp_path)]) == 0
    assert "disk      not measured:" in capsys.readouterr().out


def test_a_missing_extra_comes_with_its_command(monkeypatch, capsys):
    monkeypatch.setattr(diagnosis, "EXTRAS", {"server": ("no_such_package",)})
    assert doctor.main(["--no-disk"]) == 0
    assert "no_such_package: pip install 'moeflux-mlx[server]'" in capsys.readouterr().out


def test_metals_limit_on_threads_is_said(monkeypatch):
    assert diagnosis.thread_lines() == []
    monkeypatch.setattr(diagnosis.backend, "name", lambda: "metal")
    monkeypatch.setattr(diagnosis, "thread_limits", lambda: (384, 1024))
    (line,) = diagnosis.thread_lines()
    assert "at most 256" in line and "384 of 1024, 1024 if" in line
