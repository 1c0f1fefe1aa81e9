"""Each dialect of tool calls as its models write it, and the fixtures' chat templates with matching tokenizers."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moeflux_mlx.text.calls import gemma, minimax_m3
from moeflux_mlx.text.calls.deepseek import DEEPSEEK_V3
from moeflux_mlx.text.calls.gemma import GEMMA
from moeflux_mlx.text.calls.harmony import GPT_OSS
from moeflux_mlx.text.calls.hunyuan import HUNYUAN, HUNYUAN4, K2_HORIZON
from moeflux_mlx.text.calls.inkling import INKLING_JSON
from moeflux_mlx.text.calls.invoke import DEEPSEEK_V4, DEEPSEEK_V32, DEEPSEEK_V41, DOTS, MINIMAX
from moeflux_mlx.text.calls.kimi import KIMI
from moeflux_mlx.text.calls.kimi_k3 import KIMI_K3
from moeflux_mlx.text.calls.listed import COHERE_ACTION, HUNYUAN_A13B
from moeflux_mlx.text.calls.llama4 import LLAMA4
from moeflux_mlx.text.calls.minimax_m3 import MINIMAX_M3
from moeflux_mlx.text.calls.mistral import MISTRAL
from moeflux_mlx.text.calls.muse import MUSE_SPARK
from moeflux_mlx.text.calls.solar import SOLAR_OPEN
from moeflux_mlx.text.calls.tool_call import EXAONE, GLM, GLM_LINE, LONGCAT, LONGCAT_JSON, QWEN_JSON, QWEN_XML
from moeflux_mlx.text.channels import COHERE, HARMONY, INKLING, MUSE, SOLAR, SPANS, THINK, Channels
from moeflux_mlx.text.channels import GEMMA as GEMMAS
from moeflux_mlx.text.channels import LLAMA4 as LLAMAS
from moeflux_mlx.text.channels import MINIMAX as MINIMAXES
from moeflux_mlx.text.chat_template import SHIPPED
from moeflux_mlx.text.chat_template import TEMPLATES as SHIPPED_TEMPLATES
from moeflux_mlx.text.tokenizer import load_tokenizer

TEMPLATES = Path(__file__).parent.parent / "fixtures" / "templates"
BETWEEN = {"kimi": "0<|tool_call_argument_begin|>"}  # text that a model writes between the name and the arguments
# For each template: how its model calls tools, the variables that switch its reasoning, and its tags of reasoning.
QWEN = ({}, {"enable_thinking": False})
STYLES = {
    "qwen3_style": (QWEN_JSON, QWEN, THINK),
    "qwen35_style": (QWEN_XML, QWEN, THINK),
    "cogito_style": (DEEPSEEK_V3, [{}], None),
    "deepseek_v32": (DEEPSEEK_V32, QWEN, THINK),
    "deepseek_v4": (DEEPSEEK_V4, QWEN, THINK),
    "deepseek_v41": (DEEPSEEK_V41, QWEN, THINK),
    "text_only": (DEEPSEEK_V3, [{}], None),
    "glm_style": (GLM, QWEN, THINK),
    "kimi_style": (KIMI, [{}, {"thinking": False}], THINK),
    "minimax_style": (MINIMAX, [{}], THINK),
    "hunyuan_style": (
        HUNYUAN,
        [{"reasoning_effort": "high"}, {}],
        Channels("<think:opensource>", "</think:opensource>"),
    ),
    "hunyuan4_style": (
        HUNYUAN4,
        [{}, {"reasoning_effort": "no_think"}],
        Channels("<think:6124c78e>", "</think:6124c78e>"),
    ),
    "hunyuan_a13b_style": (HUNYUAN_A13B, [{}], THINK),
    "k2_horizon_style": (K2_HORIZON, [{}], Channels("<ifm|think>", "</ifm|think>")),
    "mistral_style": (MISTRAL, [{}], Channels("[THINK]", "[/THINK]")),
    "harmony_style": (GPT_OSS, [{}], HARMONY),
    "exaone_style": (EXAONE, QWEN, THINK),
    "gemma_style": (GEMMA, QWEN, GEMMAS),
    "qwen38_style": (QWEN_XML, QWEN, THINK),
    "glm53_style": (GLM_LINE, [{}], THINK),
    "nemotron_style": (QWEN_XML, QWEN, THINK),
    "minimax3_style": (MINIMAX_M3, [{}, {"thinking_mode": "disabled"}], MINIMAXES),
    "longcat_style": (LONGCAT, QWEN, Channels("<longcat_think>", "</longcat_think>")),
    "longcat_json_style": (LONGCAT_JSON, [{}], None),
    "llama4_style": (LLAMA4, [{}], LLAMAS),
    "cohere_style": (COHERE_ACTION, [{}], COHERE),
    "kimi_k3": (KIMI_K3, QWEN, SPANS),
    "dots_style": (DOTS, [{}], THINK),
    "inkling_style": (INKLING_JSON, [{}], INKLING),
    "muse_style": (MUSE_SPARK, [{}], MUSE),
    "solar_style": (SOLAR_OPEN, [{}, {"reasoning_effort": "low"}], SOLAR),
}
# As DeepSeek's own template: arguments are joined as text, and a missing content is an error.
TEXT_ONLY = """{% for m in messages %}{% if m.role == 'assistant' %}<a>{{ m.content + '' }}{% if m.tool_calls %}
{{- '<｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>'
 + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}
{{- '<｜tool▁calls▁end｜>' }}{% endif %}</a>{% else %}<{{ m.role }}>{{ m.content }}{{ m.tool_call_id }}{{ m.name }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"""


def written(dialect):
    """Returns a function that writes a call as models of the dialect do."""

    def write(arguments, name="get_weather"):
        begin = dialect.prefix(name) + BETWEEN.get(dialect.name, "")
        if dialect is GEMMA:
            body = gemma.written(arguments)
        elif dialect is MINIMAX_M3:
            body = minimax_m3.written(arguments) + minimax_m3.MARK
        elif dialect.tags is None:
            body = json.dumps(arguments, ensure_ascii=False)
        else:
            line = "\n" if dialect.tags.lined else ""
            (key, key_end), (value, value_end) = dialect.tags.key, dialect.tags.value
            string, other = (dialect.tags.kinds or (value, value))[:2]
            texts = {k: string + v if isinstance(v, str) else other + json.dumps(v) for k, v in arguments.items()}
            body = "".join(
                f"{key}{dialect.tags.escaped(k)}{key_end}{line}{text}{line}{value_end}\n" for k, text in texts.items()
            )
        end = dialect.section[1]
        is_written = end in dialect.markers or dialect in (DEEPSEEK_V32, DEEPSEEK_V4, DEEPSEEK_V41, MINIMAX_M3, KIMI_K3)
        return begin + body + dialect.close + (end if is_written and end not in dialect.close else "")

    return write


def thought_of(channels, prompt, text):
    """Returns reasoning as a model writes it after a prompt."""
    if channels is LLAMAS:  # they do not reason
        return ""
    if channels.header:
        return f"{channels.start}{text}{channels.end}{channels.header}"
    if channels is SPANS:
        return text + channels.closing if channels.opens(prompt) else ""
    opening = "" if channels.opens(prompt) else f"{channels.start}\n"
    return f"{opening}{text}\n{channels.end}\n\n"


def said_of(channels, text):
    """Returns text for the user, as a model writes it before a call."""
    if channels is COHERE:
        return f"{channels.lead}{text}{channels.tail}"
    if channels is None or not channels.header:
        return text
    lead = "<|channel|>commentary<|message|>" if channels is HARMONY else channels.lead
    return f"{lead}{text}{channels.end}{channels.header}"


def style_tokenizer(path, name):
    """Returns a tokenizer of single bytes with the markers that the template `name` needs, in the directory `path`."""
    dialect, _, channels = STYLES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<｜begin▁of▁sentence｜>"])
    tags = (channels or THINK).tags | (channels or THINK).ends | {"<tool_response>"}
    if dialect not in (QWEN_JSON, EXAONE, QWEN_XML, DEEPSEEK_V3):
        tags |= dialect.markers
    bpe.add_tokens([AddedToken(tag, special=False) for tag in sorted(tags)])
    bpe.save(str(path / "tokenizer.json"))
    folder = SHIPPED_TEMPLATES if name in SHIPPED else TEMPLATES
    source = TEXT_ONLY if name == "text_only" else (folder / f"{name}.jinja").read_text("utf-8")
    config = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<|im_end|>", "chat_template": source}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return load_tokenizer(path)
