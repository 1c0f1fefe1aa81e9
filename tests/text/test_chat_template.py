"""Chat templates: byte equality with transformers' recorded prompts, and templates that misbehave."""

import copy
import json
from pathlib import Path

import pytest

from moeflux_mlx.errors import RequestError, TokenizerError
from moeflux_mlx.text import chat_template
from moeflux_mlx.text.chat_template import ChatTemplate, find_templates

FIXTURES = Path(__file__).parents[1] / "fixtures" / "templates"
CASES = json.loads((FIXTURES / "cases.json").read_text("utf-8"))
GOLDENS = json.loads((FIXTURES / "goldens.json").read_text("utf-8"))["goldens"]
CHAT = [{"role": "user", "content": "hi"}]


def render_case(template, case):
    return template.render(
        case["messages"],
        tools=case.get("tools"),
        add_generation_prompt=case.get("add_generation_prompt", True),
        variables=case.get("variables"),
    )


def open_fixture(name):
    return ChatTemplate({"default": (FIXTURES / f"{name}.jinja").read_text("utf-8")}, CASES["special_tokens"])


def render_source(source, **kwargs):
    return ChatTemplate({"default": source}).render(CHAT, **kwargs)


def mismatches():
    """Returns the (template, case) pairs whose rendering is not the recorded one."""
    wrong = []
    for name, cases in GOLDENS.items():
        template = open_fixture(name)
        for case, golden in cases.items():
            try:
                same = render_case(template, CASES["cases"][case]) == golden.get("text")
            except TokenizerError:
                same = "error" in golden
            if not same:
                wrong.append((name, case))
    return wrong


@pytest.mark.parametrize("name", GOLDENS)
def test_prompts_are_byte_equal_to_transformers(name):
    template = open_fixture(name)
    for case, golden in GOLDENS[name].items():
        if "error" in golden:
            with pytest.raises(TokenizerError) as caught:
                render_case(template, CASES["cases"][case])
            assert golden["error"] in str(caught.value), case
        else:
            assert render_case(template, CASES["cases"][case]).encode() == golden["text"].encode(), case


def test_goldens_cover_every_template_and_case():
    assert set(GOLDENS) == {file.stem for file in FIXTURES.glob("*.jinja")}
    assert all(set(cases) == set(CASES["cases"]) for cases in GOLDENS.values())


@pytest.mark.parametrize("fault", ["tojson", "trim_blocks", "lstrip_blocks", "autoescape", "reasoning", "ascii"])
def test_goldens_notice_a_planted_fault(monkeypatch, fault):
    make = chat_template.make_environment

    def faulty():
        environment = make()
        if fault == "tojson":
            from jinja2.filters import FILTERS

            environment.filters["tojson"] = FILTERS["tojson"]
        elif fault == "ascii":
            environment.filters["tojson"] = lambda value, **options: json.dumps(
                value, **{**options, "ensure_ascii": True}
            )
        elif fault == "autoescape":
            environment.autoescape = True
        else:
            setattr(environment, fault, False)
        return environment

    if fault == "reasoning":
        monkeypatch.setattr(chat_template, "_with_reasoning", lambda message: message)
    else:
        monkeypatch.setattr(chat_template, "make_environment", faulty)
    assert mismatches() != []


HOSTILE = {
    "class": "{{ ''.__class__.__mro__ }}",
    "class by attr": "{{ (''|attr('__class__')).__mro__ }}",
    "class by format": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "class by format_map": "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
    "globals": "{{ raise_exception.__globals__['json'] }}",
    "cycler": "{{ cycler.__init__.__globals__.os }}",
    "type mro": "{{ namespace.mro() }}",
    "append": "{{ messages.append(1) }}",
    "append by attr": "{{ (messages|attr('append'))(1) }}",
    "update": "{{ messages[0].update(role='system') }}",
    "dict.update": "{{ dict.update(messages[0], role='system') }}",
    "namespace": "{{ namespace(__class__=1) }}",
    "namespace from dict": "{{ namespace({'_a': 1}) }}",
    "namespace set": "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
    "range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "syntax": "{% if %}",
    "unclosed": "{{ messages",
    "generation unclosed": "{% generation %}x",
    "unknown tag": "{% nonsense %}",
    "unknown filter": "{{ 1 | nonsense }}",
    "division": "{{ 1 // 0 }}",
    "undefined": "{{ nothing.at.all }}",
    "not JSON": "{{ raise_exception | tojson }}",
    "raises": "{{ raise_exception('two\nlines') }}",
    "raises nothing": "{{ raise_exception('') }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_hostile_template_is_one_line_error(source):
    chat = copy.deepcopy(CHAT)
    with pytest.raises(TokenizerError) as caught:
        ChatTemplate({"default": source}).render(chat)
    assert "\n" not in str(caught.value)
    assert "--ignore-chat-template" in str(caught.value)
    assert chat == CHAT


def test_error_carries_what_the_template_said():
    with pytest.raises(TokenizerError, match="refused these messages: roles must alternate;"):
        render_source("{{ raise_exception('roles must\nalternate') }}")


def test_endless_output_is_stopped(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_PROMPT_CHARS", 10_000)
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }} {% endfor %}{% endfor %}"
    with pytest.raises(TokenizerError, match="passes 10000 characters"):
        render_source(source)


def test_template_gets_copies_of_plain_data():
    class Text(str):
        def shout(self):
            return self.upper()

    with pytest.raises(TokenizerError):
        ChatTemplate({"default": "{{ messages[0].content.shout() }}"}).render([{"content": Text("x")}])
    with pytest.raises(RequestError, match="type object"):
        render_source("x", variables={"thing": object()})


def test_strftime_now_is_the_current_time():
    from datetime import datetime

    before = datetime.now().strftime("%Y-%m-%d %H")
    text = render_source("{{ strftime_now('%Y-%m-%d %H') }}")
    assert before <= text <= datetime.now().strftime("%Y-%m-%d %H")


def test_variables_do_not_replace_the_messages():
    source = "{{ messages[0].content }} {{ tools is none }} {{ enable_thinking }}"
    variables = {"messages": [], "tools": [{}], "enable_thinking": False}
    assert render_source(source, variables=variables) == "hi True False"


def test_bad_requests():
    template = ChatTemplate({"default": "x"})
    with pytest.raises(RequestError, match="at least one"):
        template.render([])
    with pytest.raises(RequestError, match="messages must be a list of dicts; it holds 'hi'"):
        template.render(["hi"])
    with pytest.raises(RequestError, match="tools must be a list of dicts; it holds 3"):
        template.render(CHAT, tools=[3])


def test_file_wins_over_config_entry(tmp_path):
    assert find_templates(tmp_path, {"chat_template": "config"}) == {"default": "config"}
    (tmp_path / "chat_template.jinja").write_text("file é", encoding="utf-8")
    assert find_templates(tmp_path, {"chat_template": "config"}) == {"default": "file é"}
    assert find_templates(tmp_path, {}) == {"default": "file é"}


def test_tool_use_template_is_used_with_tools(tmp_path):
    entry = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    template = ChatTemplate(find_templates(tmp_path, {"chat_template": entry}))
    assert template.source == "plain"
    assert template.render(CHAT) == "plain"
    assert template.render(CHAT, tools=[]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    template = ChatTemplate(find_templates(tmp_path, {"chat_template": entry}))
    assert (template.render(CHAT), template.render(CHAT, tools=[])) == ("file", "tools")


@pytest.mark.parametrize("entry", [3, ["text"], [{"name": "default"}], [{"name": 1, "template": "x"}], {"a": "b"}])
def test_malformed_entry(tmp_path, entry):
    with pytest.raises(TokenizerError, match="string or a list"):
        find_templates(tmp_path, {"chat_template": entry})


@pytest.mark.parametrize("entry", [None, [], [{"name": "rag", "template": "x"}]])
def test_no_default_template(tmp_path, entry):
    template = ChatTemplate(find_templates(tmp_path, {"chat_template": entry}))
    assert template.source is None
    with pytest.raises(TokenizerError, match=r"no default chat template.*--ignore-chat-template"):
        template.render(CHAT)


def test_template_file_that_is_not_text(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja cannot be read"):
        find_templates(tmp_path, {})
