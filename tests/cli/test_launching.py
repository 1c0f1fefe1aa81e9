"""A server with a program: each program gets the server's address, both end together, and errors are one line."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from tiny_models import child_environment, tiny_directory

from moeflux_mlx import launch
from moeflux_mlx.cli.programs import PROGRAMS, Address
from moeflux_mlx.server import companion
from moeflux_mlx.server.companion import Companion

SERVER = Address("http://127.0.0.1:4321", "a-key-of-letters", "a-model", 65536)

# Writes down how it was started, and does what its first argument says.
FAKE = f"""#!{sys.executable}
import json, os, signal, sys, time
from pathlib import Path
files = [Path(value).read_text() for value in os.environ.values() if "moeflux-launch-" in value]
said = dict(arguments=sys.argv[1:], environment=dict(os.environ), files=files, process=os.getpid())
out = Path(os.environ["SAID"])
out.with_suffix(".new").write_text(json.dumps(said))
out.with_suffix(".new").rename(out)
if "wait" in sys.argv:
    signal.signal(signal.SIGINT, lambda *_: out.with_suffix(".interrupted").touch())
    while True:
        time.sleep(0.1)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns a tiny model that allows long texts."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(tiny_directory("qwen3_moe"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 65536}))
    return path


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Makes a folder on the PATH with a fake of every program."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for program in PROGRAMS.values():
        (folder / program.command).write_text(FAKE)
        (folder / program.command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    return folder


def started(*words):
    command = [sys.executable, "-m", "moeflux_mlx.launch", *map(str, words)]
    return subprocess.Popen(command, env=child_environment(), stderr=subprocess.PIPE, text=True)


def wait_for(holds):
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def status(url, key):
    try:
        with urlopen(Request(url, headers={"Authorization": f"Bearer {key}"}), timeout=10) as reply:
            return reply.status
    except URLError as error:
        return getattr(error, "code", None)


def test_the_program_ends_and_the_server_with_it(model, programs, tmp_path):
    process = started("opencode", "--model", model, "--", "run", "--model", "x")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 7 and "Traceback" not in stderr and "starting opencode" in stderr
    said = json.loads((tmp_path / "said").read_text())
    assert said["arguments"] == ["run", "--model", "x"]
    (config,) = map(json.loads, said["files"])
    provider = config["provider"]["moeflux"]
    assert config["model"] == "moeflux/tiny" and provider["models"]["tiny"]["limit"]["context"] == 65536
    assert status(f"{provider['options']['baseURL']}/models", "any") is None, "the server has ended"
    assert not Path(said["environment"]["OPENCODE_CONFIG"]).parent.exists()
    assert "127.0.0.1" in said["environment"]["NO_PROXY"].split(",")


def test_a_signal_ends_both_and_an_interrupt_is_the_programs(model, programs, tmp_path, interruptible):
    process = started("aider", "--model", model, "--", "wait")
    wait_for((tmp_path / "said").exists)
    said = json.loads((tmp_path / "said").read_text())
    url, key = (said["environment"][name] for name in ("OPENAI_API_BASE", "OPENAI_API_KEY"))
    assert status(f"{url}/models", key) == 200 and status(f"{url}/models", "another-key") == 401
    for interrupted in (process.pid, said["process"]):
        os.kill(interrupted, signal.SIGINT)
    wait_for((tmp_path / "said.interrupted").exists)
    assert status(f"{url}/models", key) == 200, "the server goes on"
    process.terminate()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in stderr
    with pytest.raises(ProcessLookupError):
        os.kill(said["process"], 0)


def test_a_program_that_does_not_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(companion, "END_SECONDS", 0.1)
    deaf = Companion(None)
    deaf.stop_soon = lambda: None
    script = f"trap '' TERM; touch {tmp_path}/deaf; while :; do sleep 0.05; done"
    deaf.begin(lambda folder: (["sh", "-c", script], os.environ))
    wait_for((tmp_path / "deaf").exists)
    deaf.stop(signal.SIGTERM)
    deaf.end_program()
    assert deaf.exit_code == 128 + signal.SIGKILL


def line(capsys, *words):
    """Returns the last line that a failed start prints."""
    assert launch.main([str(word) for word in words]) == 1
    return capsys.readouterr().err.splitlines()[-1]


def test_errors_are_one_line(model, programs, tmp_path, capsys, monkeypatch):
    said = line(capsys, "codex")
    assert said == (
        "error: moeflux-demo takes 1024 tokens at most, and codex needs a context of 32768; give another --model"
    )
    assert line(capsys, "aider").endswith("and aider needs a context of 8192; give another --model")
    said = line(capsys, "codex", "--model", model, "--context", "4096")
    assert said.startswith("error: --context 4096 tokens at most, and codex needs a context of 32768; give at least")
    assert "nowhere does not exist" in line(capsys, "qwen", "--model", tmp_path / "nowhere")
    assert not (tmp_path / "said").exists(), "nothing was started"
    (programs / "goose").write_text("no program\0")
    assert "the program cannot be started: " in line(capsys, "goose", "--model", model)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert line(capsys, "qwen") == "error: qwen is not installed; npm install -g @qwen-code/qwen-code"
    assert line(capsys, "aider") == "error: aider is not installed; pip install aider-chat"


def test_a_model_that_calls_no_tools_is_refused_before_the_program_starts(model, programs, tmp_path, capsys):
    plain = shutil.copytree(model, tmp_path / "plain")
    template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    file = plain / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    for name in sorted(set(PROGRAMS) - {"aider"}):
        wanted = f"error: plain calls no tools, which {PROGRAMS[name].command} needs; give another --model"
        assert line(capsys, name, "--model", plain) == wanted
    assert not (tmp_path / "said").exists(), "nothing was started"
    assert launch.main(["aider", "--model", str(plain)]) == 7, "aider sends no tools"


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_gets_address_key_and_model(name, tmp_path):
    setup = PROGRAMS[name].setup(SERVER, tmp_path)
    files = [file.read_text() for file in tmp_path.iterdir()]
    told = " ".join([*setup.arguments, *(value for value in setup.variables.values() if value), *files])
    assert SERVER.url in told and SERVER.key in told and SERVER.model in told
    assert SERVER.key not in " ".join(setup.arguments), "every user of a machine sees the words of a command"
    own_limits = name in ("aider", "codex", "goose", "opencode")  # the other programs have no option for the model
    assert (str(SERVER.context) in told) == own_limits


def test_codex_reads_its_values_as_toml(tmp_path):
    tomllib = pytest.importorskip("tomllib")
    words = PROGRAMS["codex"].setup(SERVER, tmp_path).arguments
    assert set(words[::2]) == {"-c"}
    config = tomllib.loads("\n".join(words[1::2]))
    assert config["model_context_window"] == SERVER.context
    assert config["model_providers"]["moeflux"]["base_url"] == f"{SERVER.url}/v1"


def test_claude_uses_no_key_of_its_own(tmp_path):
    assert PROGRAMS["claude"].setup(SERVER, tmp_path).variables["ANTHROPIC_API_KEY"] is None
