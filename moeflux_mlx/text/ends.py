"""Which tokens end an answer of a model whose files name too few of them, as the metadata of a GGUF do.

llama.cpp finds ends by their texts too (`llama_vocab::impl::load`), and its converters rely on it. A template shows
one more: what it writes behind an answer is what the model writes there.
"""

from collections.abc import Iterable, Mapping

from ..errors import RequestError, TokenizerError
from .channels import closes_messages
from .gguf_tokens import TAG
from .tokenizer import TokenizerWrapper

# Texts of tokens that end an answer, a document, or a file of a repository.
TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
        *("<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "<|observation|>", "<eos>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<turn|>", "<|tool_response>", "[e~[", "<｜end▁of▁sentence｜>"),
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>"),
        *("<REPO>", "<reponame>", "<|file_sep|>"),
    }
)
OF_CONTROL = "</s>"  # an end only as a control token; elsewhere it is HTML
ANSWER, NEXT = "\ue000", "\ue001"  # texts that no template has


def all_ends(stated: Iterable[int], tokenizer: TokenizerWrapper) -> list[int]:
    """Every token that ends an answer: those of `stated`, and those that the vocabulary and the template show.

    What closes a message of an answer that has several is left out, also where it is stated.
    """
    tokens = _marks(tokenizer)
    texts = {*TEXTS, *tokenizer.channels.ends, _closing(tokenizer, tokens)}
    if tokens.get(OF_CONTROL) in tokenizer.vocabulary.special_ids:
        texts.add(OF_CONTROL)
    ends = dict.fromkeys((*stated, *sorted(tokens[text] for text in texts if text in tokens)))
    inner = {tokens.get(text) for text in closes_messages(tokens.keys())}
    return [end for end in ends if end not in inner]


def _marks(tokenizer: TokenizerWrapper) -> dict[str, int]:
    """The tokens that are no ordinary text."""
    special = tokenizer.all_special_ids
    return {token: i for token, i in tokenizer.get_vocab().items() if i in special or token in tokenizer.markers}


def _closing(tokenizer: TokenizerWrapper, tokens: Mapping[str, int]) -> str | None:
    """The token that the template writes behind an answer; None: no token, or the template fails."""
    chat = [{"role": role, "content": text} for role, text in (("user", "?"), ("assistant", ANSWER), ("user", NEXT))]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
    except (RequestError, TokenizerError):
        return None
    behind = str(text).rpartition(ANSWER)[2].partition(NEXT)[0].lstrip()
    first = max((token for token in tokens if token and behind.startswith(token)), key=len, default=None)
    return None if first is None or first == tokenizer.bos_token or TAG.fullmatch(first) else first
