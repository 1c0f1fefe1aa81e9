"""The chat command through pipes and a real terminal, and its parts."""

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import types

import mlx.core as mx
import pytest
from grids import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from styles import style_tokenizer
from tiny_models import tiny_directory, tiny_model

from moeflux_mlx import chat, model_fingerprint, stream_generate
from moeflux_mlx.chat import Display
from moeflux_mlx.driving.conversation import Conversation
from moeflux_mlx.driving.session import Session
from moeflux_mlx.errors import PromptCacheError, RequestError
from moeflux_mlx.generate.__main__ import main as generate_main
from moeflux_mlx.opening.engine import open_engine
from moeflux_mlx.text.boundaries import Rendering
from moeflux_mlx.text.calls.reader import AnswerReader
from moeflux_mlx.text.channels import THINK
from moeflux_mlx.text.events import Reasoning
from moeflux_mlx.text.tokenizer import load_tokenizer

PROMPT = r"\x1b\[\?2004h"  # bracketed paste is switched on when a line can be typed
ATTENTION, RECURRENT = "qwen3_moe", "qwen3_next"


def conversation(family=RECURRENT, system=None, **options):
    tokenizer = load_tokenizer(tiny_directory(family))
    session = Session(tiny_model(family, mx.float32), tokenizer, **options)
    return Conversation(session, tokenizer, {}, system)


def ask(talk, text, n=8, **options):
    return "".join(piece for piece, _ in talk.ask(text, max_tokens=n, **options))


def run(monkeypatch, capsys, lines, *options, family=RECURRENT):
    """Returns (exit code, stdout, stderr) of the command with these lines on a pipe."""
    data = lines if isinstance(lines, bytes) else "".join(f"{line}\n" for line in lines).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    code = chat.main(["--model", str(tiny_directory(family)), "--dtype", "float32", "-m", "8", *options])
    return code, *capsys.readouterr()


def counts(err):
    """Returns (prompt, known, from disk, computed) of each `/stats`."""
    matches = re.findall(r"last prompt: (\d+) tokens, (\d+) known, (\d+) from disk, (\d+) computed", err)
    return [tuple(map(int, one)) for one in matches]


# ---- turns ----


@pytest.mark.parametrize("family", [ATTENTION, RECURRENT])
def test_each_turn_gives_the_answer_of_a_fresh_computation(family):
    talk = conversation(family, system="You are kind.")
    for text in ("Hello", "Who are you?", "And who am I?"):
        answer = ask(talk, text)
        prompt = talk.session.tokens[: talk.session.reuse.prompt]
        assert talk.tokenizer.decode(prompt) == talk.tokenizer.apply_chat_template(talk.messages[:-1], tokenize=False)
        responses = stream_generate(talk.session.model, talk.tokenizer, prompt, max_tokens=8)
        assert answer == "".join(r.text for r in responses)


@pytest.mark.parametrize("family", [ATTENTION, RECURRENT])
def test_what_was_said_keeps_its_tokens(family):
    """The tiny models write bytes that are no UTF-8, which the tokenizer would spell with other tokens."""
    talk = conversation(family)
    ask(talk, "Hello", 20)
    said = list(talk.session.tokens)
    assert talk.tokenizer.encode(talk.tokenizer.decode(said), add_special_tokens=False) != said
    ask(talk, "More")
    assert talk.session.tokens[: len(said)] == said
    assert talk.session.reuse.memory == len(said)


def test_tokens_are_known_up_to_where_texts_part():
    """A changed answer: the tokens of the one before it stay, up to a token that no letter can join."""
    talk = conversation(ATTENTION)
    for text in ("Hello", "And then?"):
        ask(talk, text, 20)
    said, marker = list(talk.session.tokens), talk.tokenizer.convert_tokens_to_ids("<|im_end|>")
    talk.turns[-1] = {"role": "assistant", "content": "Something else."}
    ask(talk, "More")
    tokens = talk.session.tokens[: talk.session.reuse.prompt]
    assert talk.tokenizer.decode(tokens) == talk.tokenizer.apply_chat_template(talk.messages[:-1], tokenize=False)
    second_question = [i for i, token in enumerate(said) if token == marker][2]
    assert tokens[: second_question + 1] == said[: second_question + 1]
    assert talk.session.reuse.memory > second_question


def test_a_turn_computes_from_the_last_known_boundary():
    talk = conversation()
    ask(talk, "Hello")
    boundary = talk.session.points.positions[-1]
    first = talk.session.reuse
    assert boundary == first.prompt - len("<|im_start|>assistant\n") + len("<|im_start|>") - 1
    ask(talk, "More")
    assert talk.session.reuse.memory >= boundary


def test_an_edited_system_message_starts_over():
    talk = conversation(system="You are kind.")
    ask(talk, "Hello")
    talk.system = "You are rude."
    assert ask(talk, "Hello again") == ask_fresh(talk)
    assert talk.session.reuse.memory == 0


def ask_fresh(talk):
    prompt = talk.tokenizer.apply_chat_template(talk.messages[:-1])
    return "".join(r.text for r in stream_generate(talk.session.model, talk.tokenizer, prompt, max_tokens=8))


def test_a_stopped_answer_is_kept_and_a_message_without_one_is_not():
    talk = conversation()
    pieces = talk.ask("Hello", max_tokens=50)
    first = next(pieces)[0]
    pieces.close()
    assert talk.turns[0] == {"role": "user", "content": "Hello"} and first in str(talk.turns[1])
    before = list(talk.turns)

    def refuse(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(talk, "Again", prompt_progress_callback=refuse)
    assert talk.turns == before
    assert ask(talk, "Again") == ask_fresh(talk)


def test_a_conversation_beyond_the_context_is_refused(monkeypatch):
    talk = conversation()
    limit = talk.session.model.args.max_position_embeddings
    with pytest.raises(RequestError, match=f"the message has .* the model takes {limit}; shorten it"):
        ask(talk, "x" * limit)
    assert talk.turns == []
    ask(talk, "x" * (limit // 2))
    with pytest.raises(RequestError, match=f"the conversation has .* the model takes {limit}.*/reset"):
        ask(talk, "x" * (limit // 2))


@pytest.mark.parametrize("family", [ATTENTION, RECURRENT])
def test_saved_conversations_go_on_without_computing_them_again(family, tmp_path):
    fingerprint = model_fingerprint(tiny_directory(family), mx.float32)
    talk = conversation(family, system="You are kind.")
    ask(talk, "Hello")
    ask(talk, "Who are you?")
    talk.save(tmp_path / "saved", fingerprint)
    other = conversation(family)
    other.load(tmp_path / "saved", fingerprint)
    assert other.messages == talk.messages
    assert ask(other, "More") == ask(talk, "More")
    known = other.session.reuse
    assert known.memory > known.prompt / 2 and known.memory == talk.session.reuse.memory


def test_files_without_a_conversation_are_refused(tmp_path):
    fingerprint = model_fingerprint(tiny_directory(RECURRENT), mx.float32)
    talk = conversation()
    ask(talk, "Hello")
    before = list(talk.turns)
    turn = {"role": "user", "content": "x"}
    for extra in (
        {},
        {"turns": 3},
        {"turns": [3]},
        {"turns": [{"role": "user"}]},
        {"system": 1, "turns": []},
        {"turns": [{**turn, "n": 1}]},
    ):
        talk.session.save(tmp_path / "saved", fingerprint, extra)
        with pytest.raises(PromptCacheError, match="holds no conversation"):
            talk.load(tmp_path / "saved", fingerprint)
    assert talk.turns == before


def test_positions_where_prompts_may_diverge():
    tokenizer = load_tokenizer(tiny_directory(RECURRENT))
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(messages)
    whole = tokenizer.decode(prompt)
    rendering = Rendering(tokenizer, {})
    assert tokenizer.decode(prompt[: rendering.before_question(messages, prompt)]).endswith("user\n")
    assert tokenizer.decode(prompt[: rendering.before_answer(messages, prompt)]).endswith("Hi<|im_end|>\n")
    answered = [*messages, {"role": "assistant", "content": "Ho", "reasoning_content": "Hm"}]
    tokens = tokenizer.encode(whole + "<think>\nHm\n</think>\n\nHo", add_special_tokens=False)
    kept = tokenizer.decode(tokens[: rendering.after_answer(answered, tokens)])
    assert kept == whole  # the template drops the reasoning of earlier turns


# ---- reasoning ----


@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", "<", "think", ">", "/", "a", "<thi", " "]), max_size=12),
    cuts=st.lists(st.integers(1, 5)),
    inside=st.booleans(),
)
@example(parts=["<think>", "a", "</think>", "b"], cuts=[1] * 20, inside=False)
@settings(max_examples=examples(200))
def test_reasoning_is_found_however_the_text_is_cut(parts, cuts, inside):
    def split(pieces):
        reader, said = AnswerReader(None, inside_reasoning=inside), {True: "", False: ""}
        for event in [e for piece in pieces for e in reader.feed(piece)] + reader.finish():
            said[isinstance(event, Reasoning)] += event.text
        return said

    text, pieces, at = "".join(parts), [], 0
    for cut in cuts:
        pieces.append(text[at : at + cut])
        at += cut
    assert split([*pieces, text[at:]]) == split([text])


def test_channels_of_messages_are_told_apart(tmp_path):
    said = "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>Hi."

    class Says:
        args = types.SimpleNamespace(max_position_embeddings=4096)
        tokens, model = (), types.SimpleNamespace(args=args, vision=None)

        def respond(self, prompt, **_):
            yield from (types.SimpleNamespace(text=char, finish_reason=None) for char in said)
            yield types.SimpleNamespace(text="", finish_reason="stop")

    talk = Conversation(Says(), style_tokenizer(tmp_path, "harmony_style"), {})
    pieces = list(talk.ask("Hello?"))
    assert "".join(piece for piece, thinking in pieces if thinking) == "why"
    assert "".join(piece for piece, thinking in pieces if not thinking) == "Hi."
    assert talk.turns[-1] == {"role": "assistant", "content": "Hi.", "reasoning_content": "why"}
    assert "<|channel|>final<|message|>Hi.<|end|>" in talk.rendering.text([*talk.messages, talk.turns[0]])


def test_reasoning_is_shown_dimmed_tagged_or_not_at_all():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def shown(out, hide):
        display = Display(out, hide)
        for piece in (("Hm", True), ("m", True), ("Yes", False)):
            display.piece(*piece)
        display.finish()
        return out.getvalue()

    assert shown(Terminal(), False) == "\033[2mHmm\033[0m\nYes\n"
    assert shown(io.StringIO(), False) == "<think>Hmm</think>\nYes\n"
    terminal = Terminal()
    Display(terminal, False).piece("a\x1b[2J\x9b\tb\n", False)
    assert terminal.getvalue() == "a[2J\tb\n"
    assert shown(io.StringIO(), True) == shown(Terminal(), True) == "Yes\n"
    assert THINK.opens("<|im_start|>assistant\n<think>\n") and not THINK.opens("<think>\n\n</think>\n\n")


# ---- the command, through pipes ----


def test_lines_of_a_pipe(monkeypatch, capsys, tmp_path):
    saved = tmp_path / "saved"
    lines = ["Hello", "/stats", "More", "/stats", f"/save {saved}", "/reset", "Hello", "/stats"]
    lines += [f"/load {saved}", "More still", "/stats", "", "/exit", "never said"]
    code, out, err = run(monkeypatch, capsys, lines, "--system-prompt", "You are kind.")
    assert code == 0 and "error" not in err
    answers = out.split("\n")
    assert answers[0] and "Saved 4 messages" in err and "Loaded 4 messages" in err
    first, second, third, fourth = counts(err)
    assert first[1:3] == (0, 0) and second[1] > first[0] / 2 and third[0] == first[0]
    assert 0 < third[1] < third[0] and fourth[1] > second[1]


def test_mistakes_are_reported_and_the_chat_continues(monkeypatch, capsys, tmp_path):
    (tmp_path / "bad").write_bytes(b"nonsense")
    lines = ["/what", "/save", "/load", f"/load {tmp_path}/none", f"/load {tmp_path}/bad", f"/save {tmp_path}/no/x"]
    lines += [f"/save {tmp_path}/bad", "/save /", "/save ~nobody-of-that-name/x", f"/load {'x' * 300}"]
    lines += ["/system You are kind.", "/system", "/help", "//literally", "/stats"]
    code, out, err = run(monkeypatch, capsys, lines)
    assert code == 0 and len(re.findall("^error: ", err, re.M)) == 10
    for part in ("no command /what", "/save needs", "cannot be read", "not a prompt", "not a prompt", "cannot be used"):
        assert part in err
    assert "message is set" in err and "message is removed" in err and "Alt-Enter" in err
    assert counts(err)[0][0] > 0
    assert (tmp_path / "bad").read_bytes() == b"nonsense"


def test_an_answer_ends_at_the_models_context():
    talk, ends = conversation(), []

    def respond(prompt, max_tokens, **_):
        ends.append(len(prompt) + max_tokens)
        return (response for response in ())

    talk.session.respond = respond
    for n in (-1, 10**6, 5):
        ask(talk, "Hello", n)
    limit = talk.session.model.args.max_position_embeddings
    assert ends[:2] == [limit, limit] and ends[2] < limit


def test_the_first_line_names_the_model(monkeypatch, capsys):
    _, _, err = run(monkeypatch, capsys, [])
    assert err.splitlines()[0] == f"{tiny_directory(RECURRENT)} is ready. /help lists the commands."
    assert "threshold" not in err
    assert "threshold" in run(monkeypatch, capsys, [], "--verbose")[2]
    assert "pread (forced)" in run(monkeypatch, capsys, [], "--expert-io", "pread")[2]


def test_answers_that_were_cut_say_so(monkeypatch, capsys):
    endless, ending = stopping_at(999), stopping_at(*range(256))
    engines = iter([endless, endless, ending])
    monkeypatch.setattr(chat, "load_named", lambda *_: next(engines))
    _, _, err = run(monkeypatch, capsys, ["Hello", "Hello"], "-m", "5")
    assert err.count("(cut after 5 tokens; --max-tokens -1 has no limit)\n") == 2
    limit = endless.model.args.max_position_embeddings
    _, _, err = run(monkeypatch, capsys, ["x" * (limit - 60)], "-m", "-1")
    assert f"(the text has the {limit} tokens that the model takes)" in err
    assert "(cut" not in (err := run(monkeypatch, capsys, ["Hello"])[2]) and "(the text" not in err


def stopping_at(*ends):
    """Returns what `load_named` gives, with other stop tokens."""
    engine = open_engine(tiny_directory(RECURRENT), dtype=mx.float32)
    engine.tokenizer.eos_token_ids = set(ends)
    return engine


def test_a_conversation_that_outgrows_the_plan_is_reported_once(monkeypatch, capsys):
    _, _, err = run(monkeypatch, capsys, ["Hello", "Hello again", "And again", "/reset", "Hi"], "--context", "50")
    said = re.findall(r"the prompt has (\d+) tokens and memory was planned for 50; --context (\d+) leaves room", err)
    assert len(said) == 1 and int(said[0][1]) == 2 * int(said[0][0])


def test_bytes_that_are_not_text_are_refused(monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, b"\xff\xfe\nHello\n")
    assert code == 0 and err.count("error: ") == 1


def test_impossible_options(monkeypatch, capsys):
    for options in (["--temp", "-1"], ["--seed", "-1"], ["--chat-template-config", "3"], ["--prompt-cache-gb", "0"]):
        code, _, err = run(monkeypatch, capsys, ["Hello"], *options)
        assert code == 1 and err.splitlines()[-1].startswith("error: ")


def test_prompts_are_found_again_after_a_restart(monkeypatch, capsys, tmp_path):
    options = ["--prompt-cache-dir", str(tmp_path / "kept"), "--system-prompt", "You are kind."]
    answers, stats = [], []
    for _ in range(2):
        code, out, err = run(monkeypatch, capsys, ["Hello", "/stats"], *options)
        assert code == 0
        answers.append(out)
        stats += counts(err)
    assert answers[0] == answers[1]
    assert stats[0][2] == 0 and stats[1][2] > stats[1][3] > 0


def test_generate_finds_prompts_again(capsys, tmp_path):
    base = [
        "--model",
        str(tiny_directory(RECURRENT)),
        "-m",
        "4",
        "--system-prompt",
        "You are kind.",
        "--dtype",
        "float32",
    ]
    options = [*base, "--prompt-cache-dir", str(tmp_path / "kept")]
    seen = []
    for prompt in ("Hello", "Hello", "Another question"):
        assert generate_main([*options, "-p", prompt]) == 0
        out, err = capsys.readouterr()
        known, total = map(int, re.search(r"prompt cache: (\d+) of (\d+) tokens", err).groups())
        seen.append((out, known, total))
        assert generate_main([*base, "-p", prompt]) == 0
        assert capsys.readouterr().out == out
    assert seen[0][1] == 0 and seen[1][1] == seen[1][2] - 1
    assert seen[2][1] > 20  # the system prompt is kept by itself


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--prompt-cache-dir=b", "--prompt-cache-gb=0"], "--prompt-cache-gb is 0.0; it must be positive"),
    ],
)
def test_a_place_that_cannot_have_prompts_is_refused_before_the_model_is_loaded(options, why, capsys):
    assert generate_main(["--model", "/no/model", *options]) == 1
    assert why in capsys.readouterr().err


def test_a_file_of_lines_that_cannot_be_written_is_refused(capsys):
    assert chat.main(["--model", "/no/model", "--history-file", "/nosuch/lines"]) == 1
    assert "--history-file is /nosuch/lines, and there is no directory /nosuch;" in capsys.readouterr().err


def test_a_first_interrupt_stops_the_answer(interruptible, monkeypatch, capsys):
    talk = conversation()
    display_piece = Display.piece

    def piece(self, text, is_thinking):
        display_piece(self, text, is_thinking)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Display, "piece", piece)
    before = signal.getsignal(signal.SIGINT)
    told = chat.Chat(talk, open_engine(tiny_directory(RECURRENT)), {"max_tokens": 50})
    assert told.take("Hello")
    assert "(stopped)" in capsys.readouterr().err and signal.getsignal(signal.SIGINT) is before
    assert len(talk.turns) == 2 and talk.session.last.generation_tokens < 10


# ---- the command, in a terminal ----


class Terminal:
    """A child process on its own pseudo-terminal."""

    def __init__(self, *command):
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.child = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(slave)
        self.seen = ""

    def send(self, text):
        os.write(self.master, text.encode())

    def wait_for(self, pattern, seconds=60):
        """Reads until `pattern` occurs in what came since the last match."""
        until = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen, re.S)):
            ready, _, _ = select.select([self.master], [], [], max(0, until - time.monotonic()))
            assert ready, f"{pattern!r} did not come; there was {self.seen[-500:]!r}"
            try:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
            except OSError:  # the child has ended
                pytest.fail(f"{pattern!r} did not come before the end; there was {self.seen[-2000:]!r}")
        self.seen = self.seen[match.end() :]

    def close(self):
        code = self.child.wait(timeout=30)
        os.close(self.master)
        return code


def _own_terminal():
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_in_a_terminal(tmp_path, interruptible):
    history = tmp_path / "history"
    model = shutil.copytree(tiny_directory(RECURRENT), tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": 999}')  # answers never end by themselves
    command = [sys.executable, "-m", "moeflux_mlx.chat", "--model", str(model), "--dtype", "float32"]
    terminal = Terminal(*command, "--max-tokens", "-1", "--history-file", str(history))
    try:
        terminal.wait_for(PROMPT)
        terminal.send("/systm\x7fem Be kind.\r")  # edited while typing
        terminal.wait_for("message is set")
        terminal.wait_for(PROMPT)
        terminal.send("Hello\r")
        terminal.wait_for(r"tokens\r\x1b\[K[^\r]{20,}")  # the progress line is erased and an answer begins
        terminal.send("\x03")
        terminal.wait_for(r"\(stopped\)")
        terminal.wait_for(PROMPT)
        terminal.send("/stats\r")
        terminal.wait_for("last prompt: .* first token")
        terminal.wait_for(PROMPT)
        terminal.send("\x03")
        terminal.wait_for("Ctrl-D or /exit leaves")
        terminal.wait_for(PROMPT)
        terminal.send("\x1b[A\x1b[A\x1b[A\r")  # three lines back in the history
        terminal.wait_for("message is set")
        terminal.wait_for(PROMPT)
        terminal.send("\x04")
        assert terminal.close() == 0
    finally:
        terminal.child.kill()
        terminal.child.wait()
    assert "+Hello" in history.read_text()


def test_json_of_a_saved_conversation_is_plain(tmp_path):
    talk = conversation(system="You are kind.")
    ask(talk, "Hello")
    talk.save(tmp_path / "saved", model_fingerprint(tiny_directory(RECURRENT), mx.float32))
    head = (tmp_path / "saved").read_bytes()[:2000]
    start = head.index(b"{")
    value, _ = json.JSONDecoder().raw_decode(head[start:].decode("latin1"))
    assert value["extra"]["turns"][0] == {"role": "user", "content": "Hello"}
