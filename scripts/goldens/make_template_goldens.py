"""Renders every template and case under tests/fixtures/templates with transformers, into goldens.json there.

Needs transformers (no torch). Run it again after changing a template or a case:

    python scripts/goldens/make_template_goldens.py
"""

import json
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, models

FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "templates"


def make_tokenizer(special_tokens: dict[str, str]) -> Any:
    """Returns a tokenizer without words: rendering needs only the names of its special tokens."""
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **special_tokens)


def render(tokenizer: Any, template: str, case: dict[str, Any]) -> dict[str, str]:
    """Returns {"text": prompt}, or {"error": message} if the template refuses the case."""
    try:
        text = tokenizer.apply_chat_template(
            case["messages"],
            tools=case.get("tools"),
            chat_template=template,
            add_generation_prompt=case.get("add_generation_prompt", True),
            tokenize=False,
            **case.get("variables", {}),
        )
    except Exception as error:  # a refusal is a result here, whatever its type
        return {"error": str(error)}
    return {"text": text}


def main() -> None:
    """Writes goldens.json: template name -> case name -> result."""
    cases = json.loads((FIXTURES / "cases.json").read_text(encoding="utf-8"))
    tokenizer = make_tokenizer(cases["special_tokens"])
    goldens = {
        file.stem: {name: render(tokenizer, file.read_text("utf-8"), case) for name, case in cases["cases"].items()}
        for file in sorted(FIXTURES.glob("*.jinja"))
    }
    content = {"transformers": transformers.__version__, "goldens": goldens}
    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    (FIXTURES / "goldens.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
