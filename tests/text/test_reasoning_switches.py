"""A request's wishes about reasoning, in each template's variables."""

from pathlib import Path

import pytest

from moeflux_mlx.text.chat_template import ChatTemplate
from moeflux_mlx.text.switches import LADDER, efforts, switches

TEMPLATES = Path(__file__).parents[1] / "fixtures" / "templates"
ON_OFF = {True: {"enable_thinking": True, "thinking": True}, False: {"enable_thinking": False, "thinking": False}}
CHAT = [{"role": "user", "content": "Why?"}]


def source(name):
    return (TEMPLATES / f"{name}.jinja").read_text("utf-8")


@pytest.mark.parametrize(
    "name, thinking, effort, expected",
    [
        ("hunyuan_style", None, None, None),
        ("hunyuan_style", True, None, "high"),
        ("hunyuan_style", False, None, "no_think"),
        ("hunyuan_style", False, "none", "no_think"),
        ("hunyuan_style", False, "high", "no_think"),
        ("hunyuan_style", True, "minimal", "low"),
        ("hunyuan_style", True, "medium", "high"),
        ("hunyuan_style", True, "xhigh", "high"),
        ("mistral_style", True, "low", "high"),
        ("mistral_style", False, None, "none"),
        ("mistral_style", True, None, "high"),
        ("harmony_style", None, None, None),
        ("harmony_style", True, None, None),
        ("harmony_style", False, None, "low"),
        ("harmony_style", True, "low", "low"),
        ("harmony_style", True, "minimal", "low"),
        ("harmony_style", True, "max", "high"),
        ("harmony_style", True, "utmost", "utmost"),
        ("glm_style", True, "high", None),
        ("exaone_style", True, "high", None),
        ("qwen38_style", None, None, None),
        ("qwen38_style", True, "minimal", "low"),
        ("qwen38_style", True, "high", "xhigh"),
        ("qwen38_style", True, "max", "xhigh"),
        ("glm53_style", None, None, None),
        ("glm53_style", True, None, None),
        ("glm53_style", False, None, "low"),
        ("glm53_style", True, "medium", "high"),
        ("glm53_style", True, "xhigh", "max"),
        ("nemotron_style", True, "high", None),
        ("solar_style", True, None, None),
        ("solar_style", False, None, "minimal"),
        ("solar_style", True, "low", "low"),
        ("solar_style", True, "max", "high"),
    ],
)
def test_the_effort_is_a_word_of_the_template(name, thinking, effort, expected):
    wanted = {} if expected is None else {"reasoning_effort": expected}
    assert switches(source(name), thinking, effort) == ON_OFF.get(thinking, {}) | wanted


def test_an_effort_may_be_a_number_or_a_strength():
    numbers = {None: None, "none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.7, "high": 0.9, "max": 0.99}
    for effort, number in numbers.items():
        wanted = {} if effort is None else {"reasoning_effort": number}
        assert switches(source("inkling_style"), None, effort) == wanted
        assert switches(source("muse_style"), None, effort).get("reasoning_effort") is None
    assert switches(source("inkling_style"), False, "high") == ON_OFF[False] | {"reasoning_effort": 0.0}
    for effort, word in ((None, None), ("minimal", "low"), ("medium", "medium"), ("max", "high")):
        assert switches(source("muse_style"), None, effort) == ({} if word is None else {"reasoning_strength": word})
    assert [efforts(source(name)) for name in ("inkling_style", "muse_style")] == [["low", "medium", "high"]] * 2


def test_an_effort_or_a_mode_may_be_a_variable_of_its_own():
    for effort, low in (("minimal", True), ("low", True), ("medium", False), ("max", False), (None, False)):
        assert switches(source("nemotron_style"), None, effort) == ({"low_effort": True} if low else {})
    ultra = "{% if medium_effort %}{% endif %}"
    assert [bool(switches(ultra, None, effort)) for effort in ("low", "medium", "high")] == [True, True, False]
    for thinking, mode in ((True, "enabled"), (False, "disabled")):
        assert switches(source("minimax3_style"), thinking, "low") == ON_OFF[thinking] | {"thinking_mode": mode}


EFFORTS = ["hunyuan_style", "mistral_style", "harmony_style", "solar_style", "qwen38_style", "glm53_style"]
EFFORTS += ["inkling_style", "muse_style"]


@pytest.mark.parametrize("name", EFFORTS)
@pytest.mark.parametrize("effort", LADDER)
def test_no_template_refuses_an_effort(name, effort):
    template = ChatTemplate({"default": source(name)}, {"bos_token": "", "eos_token": ""})
    assert template.render(CHAT, variables=switches(source(name), effort != "none", effort))


@pytest.mark.parametrize(
    "name, on, off",
    [
        ("glm_style", "Why?<|assistant|>", "Why?/nothink<|assistant|>\n<think></think>"),
        ("kimi_style", "<|im_middle|>", "<|im_middle|><think></think>"),
        ("qwen35_style", "<think>\n", "<think>\n\n</think>\n\n"),
        ("exaone_style", "<think>\n", "<think>\n\n</think>\n\n"),
        ("qwen38_style", "<think>\n", "<think>\n\n</think>\n\n"),
        ("nemotron_style", "<think>\n", "<think></think>"),
        ("minimax3_style", "]~b]ai\n<mm:think>", "]~b]ai\n</mm:think>"),
        ("solar_style", "<|end|><|begin|>assistant", "<|begin|>assistant<|think|><|end|><|begin|>assistant"),
        ("hunyuan_style", "<think:opensource>", "<think:opensource></think:opensource>"),
        ("hunyuan4_style", "<think:6124c78e>", "<think:6124c78e></think:6124c78e>"),
        ("mistral_style", '"high"}[/MODEL_SETTINGS][INST]Why?[/INST]', '"none"}[/MODEL_SETTINGS][INST]Why?[/INST]'),
    ],
)
def test_reasoning_can_be_switched(name, on, off):
    template = ChatTemplate({"default": source(name)}, {"bos_token": "", "eos_token": ""})
    for thinking, end in ((True, on), (False, off)):
        assert template.render(CHAT, variables=switches(source(name), thinking, None)).endswith(end)
