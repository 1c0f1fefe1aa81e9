"""A day of a server in a model whose states cannot be cut: how many tokens of prompts it computes twice.

Lengths are 1/32 of real ones, and so are the distances of kept states. Then a state of the tiny model takes as many
bytes as the keys and values of 109 tokens; in 35B-A3B's shape it is 98 (64 MB, and 20 KB a token). Only the marks of
messages are as many as in real texts, so that they count 1/32 of the other tokens.
"""

import mlx.core as mx
import numpy as np
import pytest
from grids import marks
from tiny_models import tiny_directory, tiny_model, with_config

from moeflux_mlx import PromptDirectory, model_fingerprint
from moeflux_mlx.driving.session import CHECKPOINT_BYTES, CHECKPOINT_EVERY, Session
from moeflux_mlx.server import sessions as sessions_module
from moeflux_mlx.server.prepare import Defaults, Preparer
from moeflux_mlx.server.request import Request, Sampling
from moeflux_mlx.server.sessions import SMALL, WORTH_COPYING, Sessions
from moeflux_mlx.text.boundaries import shared_length
from moeflux_mlx.text.tokenizer import load_tokenizer

SCALE = 32
STATE, REAL_STATE = 112_128, 64_389_120  # bytes of a state of the tiny model, and of 35B-A3B's shape
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
TEMPLATE = """
{%- set last = namespace(question=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role[0] -}}
    {%- if message.role == 'assistant' and loop.index0 > last.question -%}
        {{- '<think>' + message.reasoning_content + '</think>' -}}
    {%- endif -%}
    {{- message.content + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>a<think>' -}}{%- endif -%}"""
MARKS = "<|im_start|>", "<|im_end|>", "<think>", "</think>"


class Prompts(PromptDirectory):
    """Counts the bytes that were written in `written`."""

    written = 0

    def save(self, model, cache, tokens, behind=b""):
        before = set(self.path.iterdir())
        super().save(model, cache, tokens, behind)
        self.written += sum(path.stat().st_size for path in set(self.path.iterdir()) - before)


class Day:
    """A server's sessions and store, which count the tokens that prompts would have in real texts: `computed`, and of
    these `again`, which an earlier text had up to there.
    """

    def __init__(self, folder, sessions, disk):
        path = with_config(tiny_directory("qwen3_5_moe"), folder / "model", {})
        (path / "chat_template.jinja").unlink()
        (path / "chat_template.jinja").write_text(TEMPLATE)
        model, tokenizer = tiny_model("qwen3_5_moe", mx.float32), load_tokenizer(path)
        fingerprint = model_fingerprint(path, mx.float32)
        self.store = Prompts(folder / "prompts", fingerprint, disk * STATE // REAL_STATE)
        kept = {
            "checkpoint_bytes": CHECKPOINT_BYTES * STATE // REAL_STATE,
            "checkpoint_every": CHECKPOINT_EVERY // SCALE,
        }
        self.sessions = Sessions(lambda: Session(model, tokenizer, store=self.store, **kept), sessions, 1 << 40)
        self.prepare = Preparer(tokenizer, 256, 1 << 16, Defaults(Sampling(temperature=0.0), {}))
        self.marks = [tokenizer.encode(mark, add_special_tokens=False)[0] for mark in MARKS]
        self.texts, self.computed, self.again = [], 0, 0

    def turn(self, messages, said):
        """Answers the messages with the text `said`."""
        prepared = self.prepare(Request("chat", "tiny", messages))
        prompt, kept = list(prepared.tokens), self.sessions.take(prepared.tokens)
        session = kept.session
        answer = [*session.tokenizer.encode(said, add_special_tokens=False), session.tokenizer.eos_token_id]

        def choose(tokens, logits):
            return mx.where(mx.arange(logits.shape[-1]) == answer[len(tokens) - len(prompt)], 0.0, -mx.inf)[None]

        list(session.respond(prompt, boundaries=prepared.boundaries, max_tokens=-1, logits_processors=[choose]))
        session.keep()
        self.sessions.give_back(kept, max(prepared.boundaries))
        known = max((shared_length(text, prompt[:-1]) for text in self.texts), default=0)
        reused = session.reuse.memory + session.reuse.disk
        self.computed += self.real(prompt[reused:])
        self.again += self.real(prompt[reused:known])
        self.texts.append(np.array(session.tokens))

    def real(self, tokens):
        """Returns how many tokens a real text has in the place of these, which has as many marks and roles."""
        is_mark = np.isin(tokens, self.marks)
        is_mark[1:] |= np.equal(tokens[:-1], self.marks[0])
        return int(np.where(is_mark, 1, SCALE).sum())


class Talk:
    """A conversation with an agent that calls tools; some turns edit an earlier question, leave out old results, or ask
    for the last answer again.
    """

    def __init__(self, random, messages, new, turns):
        self.random, self.messages, self.new, self.left = random, messages, new, turns

    def turn(self, day):
        self.left -= 1
        self.messages = self.next_messages(self.messages)
        thought, text = words(self.random, 2, 12), words(self.random, 1, 12)
        day.turn(self.messages, f"{thought}</think>{text}")
        said = {"role": "assistant", "content": text, "reasoning_content": thought}
        self.messages = [*self.messages, said | ({"tool_calls": [CALL]} if self.random.random() < 0.7 else {})]

    def next_messages(self, before):
        new = int(self.new * self.random.lognormal(-0.5, 1.0)) + 1
        question = {"role": "user", "content": words(self.random, new, new + 1)}
        questions = [i for i, message in enumerate(before) if message["role"] == "user"]
        kind = self.random.choice(["on", "edit", "trim", "again"], p=[0.8, 0.08, 0.06, 0.06]) if questions else "on"
        if kind == "edit":
            return [*before[: self.random.choice(questions)], question]
        if kind == "again":
            return before[:-1]
        result = question | {"role": "tool", "tool_call_id": CALL["id"]}
        results = [i for i, message in enumerate(before) if message["role"] == "tool"]
        old = results[: len(results) // 2] if kind == "trim" else []
        before = [message | ({"content": "-"} if i in old else {}) for i, message in enumerate(before)]
        return [*before, result if "tool_calls" in before[-1] else question]

    def fork(self):
        return Talk(self.random, self.messages[: -len(self.messages) // 3 or None], self.new, self.left)


def words(random, low, high):
    return "".join(map(chr, random.integers(97, 123, random.integers(low, high))))


def spend(day, lengths, turns, forks):
    """Lets conversations of these lengths take turns, one to four at a time; some fork in their middle."""
    random = np.random.default_rng(0)
    systems = [words(random, n // SCALE, n // SCALE + 1) for n in (1500, 6000)]
    firsts = [[{"role": "system", "content": systems[i % 2]}] for i in range(len(lengths))]
    talks = [Talk(random, first, n / SCALE / turns, turns) for first, n in zip(firsts, lengths, strict=True)]
    while talks:
        talk = talks[random.integers(len(talks))]
        for _ in range(min(random.integers(1, 5), talk.left)):
            talk.turn(day)
        if forks and talk.left <= turns // 2:
            forks -= 1
            talks.append(talk.fork())
        talks = [talk for talk in talks if talk.left]


@pytest.mark.parametrize(
    "lengths, turns, forks, sessions, disk, most",
    [
        ((6000, 30000, 12000), 8, 1, 6, 4 << 30, 0.01),
        pytest.param(np.geomspace(2000, 60000, 8), 20, 2, 12, 20 << 30, 0.05, marks=marks(False)),
    ],
)
def test_a_day_computes_few_tokens_twice(lengths, turns, forks, sessions, disk, most, tmp_path, monkeypatch):
    monkeypatch.setattr(sessions_module, "SMALL", SMALL // SCALE)
    monkeypatch.setattr(sessions_module, "WORTH_COPYING", WORTH_COPYING // SCALE)
    day = Day(tmp_path, sessions, disk)
    spend(day, lengths, turns, forks)
    written = day.store.written * REAL_STATE / STATE / 1e9
    print(f"{len(day.texts)} turns, {day.computed} tokens, {day.again} again, {written:.1f} GB written")
    assert day.again <= most * day.computed
