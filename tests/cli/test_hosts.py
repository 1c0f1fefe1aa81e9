"""Preparing several machines; a single one plays all of them behind a fake ssh."""

import json
import os
import stat
import sys

import pytest

from moeflux_mlx import ranks

SSH = """#!{python}
import json, os, subprocess, sys
host, command = sys.argv[-2:]
script = json.load(open({script!r})).get(host)
if script is None:
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    facts = json.loads(done.stdout)
    facts["moeflux-mlx"] = facts["mlx"] = "1.0"
    print("welcome to", host)
    print(json.dumps(facts))
    sys.exit(done.returncode)
if "exit" in script:
    print(script["exit"], file=sys.stderr)
    sys.exit(255)
facts = {{"moeflux-mlx": "1.0", "mlx": "1.0", "machine": "m", "system": "s", "python": "3", "files": {{}}}}
print(script.get("text") or json.dumps(facts | script))
"""


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """Sets the answer of each host. A host without an answer runs the command here."""
    script = tmp_path / "script.json"
    script.write_text("{}")
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH.format(python=sys.executable, script=str(script)))
    ssh.chmod(ssh.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    return lambda **answers: script.write_text(json.dumps(answers))


def prepare(tmp_path, *arguments):
    return ranks.main([*arguments, "--output", str(tmp_path / "hosts.json")])


def test_a_host_file_and_a_command(tmp_path, hosts, capsys):
    model = tmp_path / "a model's"
    model.mkdir()
    (model / "config.json").write_text("{}")
    given = ("--hosts", "me@a,b", "--ips", "10.0.0.1,10.0.0.2", "--model", str(model))
    assert prepare(tmp_path, *given) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("mlx.launch --backend ring --hostfile ") and "a model'\"'\"'s" in captured.out
    assert "neither authenticated nor encrypted" in captured.err
    rows = json.loads((tmp_path / "hosts.json").read_text())
    assert rows == [{"ssh": "me@a", "ips": ["10.0.0.1"]}, {"ssh": "b", "ips": ["10.0.0.2"]}]


@pytest.mark.parametrize(
    "arguments, answers, said",
    [
        (["--hosts", "a"], {}, "at least two machines"),
        (["--hosts", "a,a"], {}, "each once"),
        (["--hosts", "a,b", "--ips", "1"], {"a": {}, "b": {}}, "1 addresses for 2 hosts"),
        (["--hosts", "a,b"], {"a": {}, "b": {"exit": "Permission denied"}}, "b: Permission denied"),
        (["--hosts", "a,b"], {"a": {}, "b": {"moeflux-mlx": "2.0"}}, "b has moeflux-mlx 2.0, a 1.0"),
        (["--hosts", "a,b"], {"a": {}, "b": {"moeflux-mlx": None}}, "b has moeflux-mlx none"),
        (["--hosts", "a,b"], {"a": {}, "b": {"text": "hello"}}, "b gave an unexpected answer"),
        (["--hosts", "a,b", "--model", "/m"], {"a": {"files": {"x": 1}}, "b": {}}, "b has no files in /m"),
        (
            ["--hosts", "a,b", "--model", "/m"],
            {"a": {"files": {"x": 1}}, "b": {"files": {"x": 2}}},
            "/m/x is not the same on b and a",
        ),
    ],
)
def test_impossible_hosts_are_reported(tmp_path, hosts, capsys, arguments, answers, said):
    hosts(**answers)
    assert prepare(tmp_path, *arguments) == 1
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("error:") == 1 and captured.out == ""
    assert not (tmp_path / "hosts.json").exists()


def test_another_version_of_mlx_is_reported(tmp_path, hosts, capsys):
    hosts(a={}, b={"mlx": "2.0"})
    assert prepare(tmp_path, "--hosts", "a,b") == 0
    assert "note: b has mlx 2.0, a 1.0" in capsys.readouterr().err


def test_a_host_file_that_cannot_be_written_is_refused_before_a_host_is_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ranks, "look", lambda *given: pytest.fail("a host was asked"))
    assert ranks.main(["--hosts", "a,b", "--model", "m", "--output", str(tmp_path / "absent" / "hosts.json")]) == 1
    assert f"there is no directory {tmp_path}/absent; make it first" in capsys.readouterr().err
