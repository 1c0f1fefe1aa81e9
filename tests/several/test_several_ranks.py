"""One model over several processes on this machine: the bits of one, and all of them end together."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from rank_processes import LIMIT, alone, command, ended, ring, started, together
from tiny_models import tiny_directory

from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import backend

pytestmark = pytest.mark.skipif(backend.has_kernels(), reason="processes on one machine share its GPU")

WORK = """
import hashlib, os, sys
import mlx.core as mx, numpy as np
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.several.joining import join
from moeflux_mlx.several.ranks import Ranks
from moeflux_mlx.several.group import Exchange
from moeflux_mlx.ops import native
native.set_threads(1)
options = eval(sys.argv[2])
ranks = Ranks(Exchange(join(os.environ)), share=options.pop("share", 1))
model = load_model(sys.argv[1], dtype=mx.float32, ranks=ranks, **options)
digest = hashlib.sha256()
for length, decoded in eval(sys.argv[3]):
    cache = model.make_cache()
    tokens = (np.arange(length) * 7 % 200).tolist()
    for chunk in [tokens, *([i] for i in range(decoded))]:
        digest.update(np.array(model(mx.array([chunk]), cache)).tobytes())
print(digest.hexdigest())
"""
LEAST = {"expert_io": "pread", "expert_cache_bytes": 1}
LENGTHS = [(1, 3), (31, 6), (100, 1)]


def digest_alone(path, lengths, **options):
    """Returns what WORK prints in one process."""
    model = load_model(path, dtype=mx.float32, **options)
    digest = hashlib.sha256()
    for length, decoded in lengths:
        cache = model.make_cache()
        tokens = (np.arange(length) * 7 % 200).tolist()
        for chunk in [tokens, *([i] for i in range(decoded))]:
            digest.update(np.array(model(mx.array([chunk]), cache)).tobytes())
    return digest.hexdigest() + "\n"


@pytest.mark.parametrize(
    "family, options",
    [
        ("qwen3_5_moe", [{"expert_io": "pread", "prefetch": "off"}, {"share": 3, "expert_io": "pread"}]),
        ("qwen3_moe", [{"expert_io": "mmap"}, LEAST, {"prefetch": "off"}]),
        pytest.param("qwen3_moe", [LEAST] * 2, marks=pytest.mark.full),  # reads are assigned, as in test_dealing.py
        ("gpt_oss", [LEAST, {"expert_io": "mmap"}]),  # a family with windows, and with experts that add biases
        pytest.param("kimi_k3", [LEAST, {}], marks=pytest.mark.full),  # latent experts with a norm of their sum
        pytest.param("deepseek_v41", [LEAST, {}], marks=pytest.mark.full),  # streams, n-grams and shared entries
    ],
)
def test_the_bits_of_one_process(tmp_path, family, options):
    path, file = tiny_directory(family), ring(tmp_path, len(options))
    options = [{**one, "set": {"span": 32}} for one in options]
    ranks = [started(file, rank, WORK, path, options[rank], LENGTHS) for rank in range(len(options))]
    expected = digest_alone(path, LENGTHS, set={"span": 32})
    for code, out, err in ended(ranks):
        assert (code, out) == (0, expected), err


def full(*values):
    """Marks a case that test_joining.py also checks, in threads or with fewer processes."""
    return pytest.param(*values, marks=pytest.mark.full)


PROMPT = "Who can talk to owls, and why would anybody want to?"
GENERATE = ("generate", "--dtype", "float32", "-m", "12", "--prompt")


@pytest.fixture(scope="module")
def model():
    return str(tiny_directory("qwen3_5_moe"))


@pytest.fixture(scope="module")
def answer(model):
    """Returns what one process writes."""
    code, out, err = alone(*GENERATE, PROMPT, "--model", model)
    assert code == 0, err
    return out


def test_saved_prompts_are_those_of_rank_0(tmp_path, model, answer):
    """One process writes a prompt, two continue from it and write another, and one continues from that."""
    store = ("--prompt-cache-dir", str(tmp_path / "prompts"))
    assert alone(*GENERATE, PROMPT, "--model", model, *store)[1] == answer
    given = ("--model", model, *store)
    first, second = together(tmp_path, 2, *GENERATE, PROMPT, *given, options=[(), ("--expert-io", "pread")])
    assert first[:2] == (0, answer) and second == (0, "", ""), first[2]
    assert "prompt cache: 0 of" not in first[2]
    longer = PROMPT + " Tell me."
    expected = alone(*GENERATE, longer, "--model", model)[1]
    first, second = together(tmp_path, 2, *GENERATE, longer, "--model", model, *store)
    assert first[:2] == (0, expected), (first[2], second)
    code, out, err = alone(*GENERATE, longer, "--model", model, *store)
    assert out == expected and "prompt cache: 0 of" not in err


def test_a_chat_of_several_answers(tmp_path, model):
    chat = ("chat", "--model", model, "--dtype", "float32", "-m", "8")
    file = tmp_path / "talk"
    talk = f"Hello, who is there?\nAnd why?\n/save {file}\nOne more.\n/load {file}\nOne more.\n/reset\nHello.\n/exit\n"
    expected = alone(*chat, text=talk)
    first, second = together(tmp_path, 2, *chat, text=talk)
    assert first[:2] == expected[:2] and first[0] == 0, first[2]
    assert second == (0, "", "")


@pytest.mark.parametrize(
    "options, said",
    [
        (("--dtype", "bfloat16"), "rank 1 has another dtype than rank 0"),
        full(("--context", "777"), "rank 1 has another context than rank 0 (777"),
        full(("--rank-share", "0"), "rank 1 asks for a share of 0"),
        full(("--expert-io", "resident"), "rank 1 is gone"),
        (("--expert-cache-gb", "-1"), "rank 1 is gone"),
    ],
)
def test_a_difference_is_reported_by_all(tmp_path, model, options, said):
    first, second = together(tmp_path, 2, *GENERATE, PROMPT, "--model", model, options=[(), options])
    assert first[0] == second[0] == 1 and first[1] == second[1] == ""
    assert said in first[2] and first[2].count("error:") == second[2].count("error:") == 1
    assert "gone" in said or said in second[2]


@pytest.mark.full
def test_another_rounding_is_refused(tmp_path, model):
    plain = ("generate", "-m", "12", "--prompt", PROMPT, "--model", model)
    for code, out, err in together(tmp_path, 2, *plain, options=[(), ("--set", "cpu_activations=16")]):
        assert code == 1 and out == "" and "rank 1 has another rounding than rank 0; give all" in err


def test_another_model_is_refused(tmp_path, model):
    other = str(tiny_directory("qwen3_moe"))
    first, second = together(tmp_path, 2, *GENERATE, PROMPT, options=[("--model", model), ("--model", other)])
    assert first[0] == second[0] == 1 and "rank 1 has another model than rank 0" in first[2]


def long_answer(file, rank, model, seconds):
    options = ("-m", "100000", "--rank-seconds", str(seconds))
    return started(file, rank, *command("generate", "--model", model, *options))


@pytest.mark.parametrize(
    "number, rank, said",
    [
        (signal.SIGKILL, 1, "rank 1 is gone"),
        (signal.SIGSTOP, 1, "has waited 3 s for the others"),
        full(signal.SIGSTOP, 0, "has waited 3 s for the others"),
        (signal.SIGINT, 0, "rank 0 is gone"),
        full(signal.SIGINT, 1, "rank 1 is gone"),
        full(signal.SIGTERM, 0, "rank 0 is gone"),
    ],
)
def test_all_ranks_end_with_one(tmp_path, model, number, rank, said, interruptible):
    file = ring(tmp_path, 2)
    ranks = [long_answer(file, i, model, seconds=3 if number == signal.SIGSTOP else 60) for i in range(2)]
    assert ranks[0].stdout.read(1), "it is answering"
    ranks[rank].send_signal(number)
    if number == signal.SIGSTOP:
        (other,) = ended([ranks[1 - rank]])
        ranks[rank].kill()
        ranks[rank].communicate()
    else:
        other = ended(ranks)[1 - rank]
        assert ranks[rank].returncode != 0
    assert other[0] != 0 and (said in other[2] or (number == signal.SIGINT and rank == 0)), other
    with contextlib.closing(socket.socket()) as free:  # its port is free again
        host, port = json.loads(file.read_text())[1 - rank][0].split(":")
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind((host, int(port)))


def test_a_rank_that_comes_late_is_waited_for(tmp_path, model, answer):
    file = ring(tmp_path, 2)
    first = started(file, 0, *command(*GENERATE, PROMPT, "--model", model))
    time.sleep(3)
    second = started(file, 1, *command(*GENERATE, PROMPT, "--model", model))
    assert [one[:2] for one in ended([first, second])] == [(0, answer), (0, "")]


def test_a_port_that_is_taken(tmp_path, model):
    file = ring(tmp_path, 2)
    with socket.socket() as taken:
        host, port = json.loads(file.read_text())[0][0].split(":")
        taken.bind((host, int(port)))
        taken.listen()
        (result,) = ended([started(file, 0, *command(*GENERATE, PROMPT, "--model", model))])
    assert result[0] == 1 and "cannot join the other ranks over ring" in result[2]


def test_ctrl_c_stops_an_answer_of_a_chat_and_not_the_chat(tmp_path, model, interruptible):
    file = ring(tmp_path, 2)
    options = ("--model", model, "--dtype", "float32", "-m", "2000")
    ranks = [started(file, i, *command("chat", *options)) for i in range(2)]
    ranks[0].stdin.write("Hello, who is there?\n")
    ranks[0].stdin.flush()
    assert ranks[0].stdout.read(1)
    ranks[0].send_signal(signal.SIGINT)
    first, second = ended(ranks, ["/reset\n/exit\n"])
    assert first[0] == 0 and second == (0, "", ""), first


def test_a_record_that_cannot_be_read_is_an_error_on_all(tmp_path, model):
    """The file is cut short during a chat. The answer fails on both ranks, and the chat continues."""
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    file = ring(tmp_path, 2)
    options = (
        "--dtype",
        "float32",
        "-m",
        "8",
        "--expert-io",
        "pread",
        "--prefetch",
        "off",
        "--expert-cache-gb",
        "1e-9",
    )
    ranks = [started(file, i, *command("chat", "--model", str(broken if i else model), *options)) for i in range(2)]
    ranks[0].stdin.write("Hello, who is there?\n")
    ranks[0].stdin.flush()
    assert ranks[0].stdout.readline()
    for layer in sorted((broken / "packed_experts").glob("*.bin")):
        os.truncate(layer, 4096)
    first, second = ended(ranks, ["And a longer question, for which other experts are read?\n/exit\n"])
    assert first[0] == second[0] == 0, (first, second)
    assert "rank 1 could not compute its experts" in first[2] and "error:" in second[2]


def asked(port, prompt, tokens):
    """Returns the server's completion."""
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=LIMIT) as response:
        text = json.load(response)["choices"][0]["text"]
    return text.replace("\r", "\n").rstrip("\n")  # as it arrives through a pipe


def serving(file, model):
    """Starts a server on two ranks, and yields its port once it is ready."""
    options = ("--model", model, "--dtype", "float32", "--port", "0", "--sessions", "2", "--rank-seconds", "20")
    ranks = [started(file, rank, *command("serve", *options)) for rank in range(2)]
    for line in ranks[0].stderr:
        if "serving at" in line:
            return ranks, int(line.split("127.0.0.1:")[1].split("/")[0])
    raise AssertionError(ended(ranks))


def test_a_server_of_two_ranks(tmp_path, model, interruptible):
    prompts = [f"{who} can talk to owls, and why would anybody want to?" * 3 for who in ("She", "He", "She who")]
    expected = []
    for prompt in prompts:
        out = alone(
            "generate", "--dtype", "float32", "-m", "6", "--ignore-chat-template", "--prompt", prompt, "--model", model
        )
        expected.append(out[1].rstrip("\n"))
    ranks, port = serving(ring(tmp_path, 2), model)
    for i in range(9):
        assert asked(port, prompts[i % 3], 6) == expected[i % 3]
    time.sleep(1.5)  # longer than the longest sleep
    assert asked(port, prompts[0], 6) == expected[0]
    ranks[0].send_signal(signal.SIGINT)
    first, second = ended(ranks)
    assert first[0] == second[0] == 130 and second[1:] == ("", ""), (first, second)


def cpu_seconds(process):
    """Returns the processor time of a process so far (Linux)."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_200_requests_and_an_idle_minute(tmp_path, model, interruptible):
    """Two requests run at a time. Then there are none, and no rank keeps a core busy; then requests run as before."""
    prompts = [f"{who} can talk to owls, and why would anybody want to?" for who in ("She", "He", "She who", "Who")]
    ranks, port = serving(ring(tmp_path, 2), model)
    expected = [asked(port, prompt, 6) for prompt in prompts]
    with ThreadPoolExecutor(2) as clients:
        answers = list(clients.map(lambda i: asked(port, prompts[i % 4], 6), range(200)))
    assert answers == [expected[i % 4] for i in range(200)]
    before = [cpu_seconds(rank) for rank in ranks]
    time.sleep(60)
    used = [cpu_seconds(rank) - start for rank, start in zip(ranks, before, strict=True)]
    assert max(used) < 10, used
    assert [asked(port, prompt, 6) for prompt in prompts] == expected
    ranks[0].send_signal(signal.SIGINT)
    first, second = ended(ranks)
    assert first[0] == second[0] == 130 and second[1:] == ("", ""), (first, second)


def test_a_server_ends_if_a_rank_ends(tmp_path, model):
    ranks, port = serving(ring(tmp_path, 2), model)
    assert asked(port, "Hello", 3)
    ranks[1].kill()
    first, _ = ended(ranks)
    assert first[0] == 75 and "rank 1 is gone" in first[2]
