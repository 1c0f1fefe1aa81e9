"""Tokenizer files, streaming decode, stop tokens and thinking tags, on small tokenizers trained here."""

import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from moeflux_mlx.errors import RequestError, TokenizerError
from moeflux_mlx.state.prompt_file import tokenizer_digest
from moeflux_mlx.text.byte_pairs import byte_alphabet
from moeflux_mlx.text.tokenizer import VOCABULARY_FILES, load_tokenizer

KIMI = Path(__file__).parents[1] / "fixtures" / "tokenizers" / "kimi"
TEKKEN = KIMI.with_name("tekken")
CORPUS = [
    "Once upon a time there was a fox named Ravi.\nThe fox liked the red ball very much.",
    "Ravi said hello to the moon, and the moon said: naïve! 日本語のテキスト 🙂",
    "def f(x):\n    return x + 1\n",
] * 20
MARKERS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
THINK = ["<think>", "</think>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# How a sentencepiece model treats spaces: it keeps them, adds one in front, or also squeezes several into one.
SPACING = {
    "exact": dict(add_dummy_prefix=False, remove_extra_whitespaces=False, normalization_rule_name="identity"),
    "prefix": dict(add_dummy_prefix=True, remove_extra_whitespaces=False, normalization_rule_name="identity"),
    "squeeze": {},
}
QUICK = settings(deadline=None, max_examples=examples(150))
TEXTS = st.text(max_size=40) | st.text("aR 日🙂é\n<|im_end|>\u0301", max_size=40)


def write_json(file, content):
    file.write_text(json.dumps(content), encoding="utf-8")


def train_bpe():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*MARKERS, "<｜begin▁of▁sentence｜>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in [*THINK, "two words", "éé"]])
    return tokenizer


def train_sentencepiece(corpus=CORPUS, symbols=MARKERS, **options):
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=model,
        vocab_size=400,
        hard_vocab_limit=False,
        model_type="bpe",
        byte_fallback=True,
        user_defined_symbols=symbols,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


@pytest.fixture(scope="session")
def bpe_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe")
    train_bpe().save(str(path / "tokenizer.json"))
    write_json(
        path / "tokenizer_config.json",
        {"eos_token": "<|im_end|>", "bos_token": None, "pad_token": "<|endoftext|>", "chat_template": CHATML},
    )
    return path


def train_in_characters():
    """Trains a tokenizer like Gemma's: spaces become another character, and bytes have tokens of their own."""
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *bytes_of, *MARKERS]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer, words = normalizers.Replace(" ", "\u2581"), pre_tokenizers.Split("\u2581", "merged_with_next")
    trained.pre_tokenizer = words
    trained.train_from_iterator(CORPUS, trainer)
    content = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in content["merges"]]
    bpe = models.BPE(content["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 2)])
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>", *MARKERS])
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in (*THINK, "\n\n", "\u2581\u2581")])
    return tokenizer


@pytest.fixture(scope="session")
def gemma_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("gemma")
    train_in_characters().save(str(path / "tokenizer.json"))
    write_json(path / "tokenizer_config.json", {"eos_token": "<eos>", "bos_token": "<bos>", "chat_template": CHATML})
    return path


@pytest.fixture(scope="session")
def gemma(gemma_dir):
    return load_tokenizer(gemma_dir)


@pytest.fixture(scope="session")
def spm_dirs(tmp_path_factory):
    paths = {}
    for name, options in SPACING.items():
        paths[name] = tmp_path_factory.mktemp(name)
        (paths[name] / "tokenizer.model").write_bytes(train_sentencepiece(**options))
        write_json(paths[name] / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
        (paths[name] / "chat_template.jinja").write_text(CHATML)
    return paths


@pytest.fixture(scope="session")
def bpe(bpe_dir):
    return load_tokenizer(bpe_dir)


@pytest.fixture(scope="session")
def spms(spm_dirs):
    return {name: load_tokenizer(path) for name, path in spm_dirs.items()}


@pytest.fixture(scope="session")
def kimi():
    return load_tokenizer(KIMI)


@pytest.fixture(scope="session")
def tekken():
    return load_tokenizer(TEKKEN)


@pytest.fixture(scope="session", params=["bpe", *SPACING])
def any_tokenizer(request, bpe, spms):
    return bpe if request.param == "bpe" else spms[request.param]


def stream(tokenizer, ids):
    """Returns the segments of a stream of tokens, the last one from finalize."""
    detokenizer = tokenizer.detokenizer
    segments = []
    for token in ids:
        detokenizer.add_token(token)
        segments.append(detokenizer.last_segment)
    detokenizer.finalize()
    segments.append(detokenizer.last_segment)
    assert detokenizer.text == "".join(segments)
    assert detokenizer.tokens == list(ids)
    return segments


def copy_dir(source, target):
    shutil.copytree(source, target, dirs_exist_ok=True)
    return target


class TestBytePair:
    @QUICK
    @given(text=TEXTS)
    def test_encode_is_the_library_s_and_decode_inverts_it(self, bpe, bpe_dir, text):
        reference = Tokenizer.from_file(str(bpe_dir / "tokenizer.json"))
        ids = bpe.encode(text)
        assert ids == reference.encode(text).ids
        assert bpe.decode(ids) == text

    @QUICK
    @given(data=st.data())
    def test_decode_of_any_ids_is_the_library_s(self, bpe, bpe_dir, data):
        reference = Tokenizer.from_file(str(bpe_dir / "tokenizer.json"))
        # The library reads this added token in the byte alphabet and so loses it (see the next test).
        plain = [i for i in range(bpe.vocab_size + 3) if i != bpe.convert_tokens_to_ids("éé")]
        ids = data.draw(st.lists(st.sampled_from(plain), max_size=30))
        for skip in (False, True):
            assert bpe.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)

    def test_added_tokens_are_literal(self, bpe):
        text = "a two words éé b"
        assert {"two words", "éé"} <= {token for token in bpe.get_vocab() if token in text}
        assert bpe.convert_tokens_to_ids("éé") in bpe.encode(text)
        assert bpe.decode(bpe.encode(text)) == text

    def test_tokens_that_only_the_config_lists_are_added(self, bpe, bpe_dir, tmp_path):
        """The ids and texts are those of transformers 5.23 for the same files."""
        last = bpe.vocab_size
        listed = {
            str(last + 1): {"content": "<tool>", "lstrip": True, "special": False, "normalized": False},
            str(last): {"content": "<extra>", "special": True, "normalized": False},
            str(bpe.convert_tokens_to_ids("<think>")): {"content": "<think>", "special": True},
        }
        shutil.copy(bpe_dir / "tokenizer.json", tmp_path)
        write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": listed})
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer.vocab_size == last + 2
        ids = tokenizer.encode("the <extra>  <tool> fox<think>")
        assert ids[-1] == bpe.convert_tokens_to_ids("<think>")
        assert [i for i in ids if i >= last] == [last, last + 1]
        assert tokenizer.decode(ids, skip_special_tokens=True) == "the <tool> fox"

    def test_byte_alphabet_is_the_library_s(self):
        alphabet = byte_alphabet()
        assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
        assert sorted(alphabet.values()) == list(range(256))
        assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["A"], alphabet["é"]) == (0x20, 0x0A, 0x41, 0xE9)

    def test_tokens_outside_the_byte_alphabet(self, tmp_path):
        tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "｜end｜": 1, "Ġ日": 2, "Ġ": 3}, merges=[]))
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        assert load_tokenizer(tmp_path).decode([0, 1, 3, 2]) == tokenizer.decode([0, 1, 3, 2]) == "a｜end｜ Ġ日"

    def test_training_leftovers_are_switched_off(self, tmp_path):
        tokenizer = train_bpe()
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=64)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        assert load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode(CORPUS[0])) == CORPUS[0]


class TestInCharacters:
    @QUICK
    @given(text=TEXTS)
    def test_encode_is_the_library_s_and_decode_inverts_it(self, gemma, gemma_dir, text):
        reference = Tokenizer.from_file(str(gemma_dir / "tokenizer.json"))
        ids = gemma.encode(text)
        assert ids == reference.encode(text).ids and ids[0] == 2
        assert gemma.decode(ids[1:]) == text.replace("\u2581", " ")
        assert gemma.encode_after(text) == ids[1:]

    @QUICK
    @given(data=st.data())
    def test_decode_of_any_ids_is_the_library_s(self, gemma, gemma_dir, data):
        """Bytes that are not a character differ: the library gives a U+FFFD for each."""
        reference = Tokenizer.from_file(str(gemma_dir / "tokenizer.json"))
        names = {token_id: token for token, token_id in gemma.get_vocab().items()}
        plain = [i for i in names if not names[i].startswith("<0x") or int(names[i][3:5], 16) < 128]
        ids = data.draw(st.lists(st.sampled_from(plain), max_size=30))
        for skip in (False, True):
            assert gemma.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)

    def test_bytes_become_characters_and_spaces_no_markers(self, gemma):
        ids = gemma.encode("\u2603", add_special_tokens=False)
        assert [gemma.token_bytes(i) for i in ids] == [b"\xe2", b"\x98", b"\x83"]
        assert stream(gemma, ids) == ["", "", "\u2603", ""]
        assert gemma.markers == {*MARKERS, *THINK, "<pad>", "<eos>", "<bos>", "<unk>"}

    def test_another_sequence_of_decoders(self, tmp_path):
        tokenizer = train_in_characters()
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(TokenizerError, match="Sequence decoder; only ByteLevel and Gemma's"):
            load_tokenizer(tmp_path)


class TestSentencePiece:
    @QUICK
    @given(text=TEXTS)
    def test_encode_is_the_library_s(self, spms, spm_dirs, text):
        for name, tokenizer in spms.items():
            reference = SentencePieceProcessor(model_file=str(spm_dirs[name] / "tokenizer.model"))
            ids = tokenizer.encode(text)
            assert ids == reference.encode(text)
            assert tokenizer.decode(ids) == reference.decode(ids)

    @QUICK
    @given(text=st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"]), max_size=40))
    def test_exact_spacing_round_trips(self, spms, text):
        assert spms["exact"].decode(spms["exact"].encode(text)) == text

    @QUICK
    @given(data=st.data())
    def test_decode_of_any_pieces_is_the_library_s(self, spms, spm_dirs, data):
        for name, tokenizer in spms.items():
            reference = SentencePieceProcessor(model_file=str(spm_dirs[name] / "tokenizer.model"))
            # The round trips test bytes: the library gives a U+FFFD for each invalid byte, and our decoder gives fewer.
            pieces = [i for i in range(tokenizer.vocab_size) if not reference.is_byte(i)]
            spaced = [i for i in pieces if reference.id_to_piece(i).startswith("\u2581")]
            ids = data.draw(st.lists(st.sampled_from(pieces) | st.sampled_from(spaced), max_size=12))
            assert tokenizer.decode(ids) == reference.decode(ids)

    def test_leading_spaces_are_the_library_s(self, spms, spm_dirs):
        for name, left in (("exact", "   a "), ("prefix", "  a "), ("squeeze", "a ")):
            reference = SentencePieceProcessor(model_file=str(spm_dirs[name] / "tokenizer.model"))
            space, word = (spms[name].convert_tokens_to_ids(piece) for piece in ("\u2581", "a"))
            ids = [1, space, space, space, word, space]
            assert spms[name].decode(ids) == reference.decode(ids) == left

    def test_markers_are_single_tokens(self, spms):
        for tokenizer in spms.values():
            ids = [tokenizer.convert_tokens_to_ids(marker) for marker in MARKERS]
            assert None not in ids
            assert len(set(ids)) == 3
            tokens = tokenizer.encode("<|im_start|>user\nRavi<|im_end|>")
            assert tokens.count(ids[0]) == tokens.count(ids[1]) == 1

    def test_spaces_between_streamed_words(self, spms):
        for tokenizer in spms.values():
            ids = tokenizer.encode("the red ball")
            assert "".join(stream(tokenizer, ids)) == "the red ball"
        # Each piece, decoded alone, keeps its space after the first one.
        assert stream(spms["prefix"], spms["prefix"].encode("the moon"))[-2:] == [" moon", ""]

    def test_defaults_come_from_the_model(self, spm_dirs, tmp_path):
        shutil.copy(spm_dirs["exact"] / "tokenizer.model", tmp_path)
        tokenizer = load_tokenizer(tmp_path)
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
        assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids("</s>")}
        assert tokenizer.decode([1, *tokenizer.encode("the"), 2]) == "the"


class TestStreaming:
    @QUICK
    @given(data=st.data())
    def test_segments_are_the_whole_decode(self, any_tokenizer, data):
        ids = data.draw(st.lists(st.integers(0, any_tokenizer.vocab_size + 2), max_size=30))
        assert "".join(stream(any_tokenizer, ids)) == any_tokenizer.decode(ids)

    @QUICK
    @given(text=st.text(min_size=1, max_size=30))
    def test_no_half_characters(self, any_tokenizer, text):
        text = text.replace("\ufffd", "")
        segments = stream(any_tokenizer, any_tokenizer.encode(text))
        assert not any("\ufffd" in segment for segment in segments)
        assert segments[-1] == ""

    def test_half_a_character_is_held_back(self, any_tokenizer):
        ids = any_tokenizer.encode("a🦊")
        assert len(ids) >= 4  # no token has the whole fox
        assert stream(any_tokenizer, ids)[-2:] == ["🦊", ""]
        cut = stream(any_tokenizer, ids[:-1])
        assert cut[-2:] == ["", "\ufffd"]
        # A planted fault: if each token is decoded alone, half characters appear.
        assert "\ufffd" in "".join(any_tokenizer.decode([token]) for token in ids)

    def test_reset_forgets(self, any_tokenizer):
        detokenizer = any_tokenizer.detokenizer
        for token in any_tokenizer.encode("hello 🦊")[:-1]:
            detokenizer.add_token(token)
        detokenizer.reset()
        assert (detokenizer.text, detokenizer.last_segment, detokenizer.tokens) == ("", "", [])
        for token in any_tokenizer.encode("the fox"):
            detokenizer.add_token(token)
        assert detokenizer.text == "the fox"
        assert any_tokenizer.detokenizer is not any_tokenizer.detokenizer

    def test_time_per_token_does_not_grow(self, any_tokenizer):
        ids = any_tokenizer.encode(CORPUS[0])
        few, many = 2_000, 64_000

        def seconds(count):
            tokens = (ids * (count // len(ids) + 1))[:count]
            detokenizer = any_tokenizer.detokenizer
            begin = time.process_time()
            for token in tokens:
                detokenizer.add_token(token)
                assert detokenizer.last_segment is not None
            return time.process_time() - begin

        # Quadratic work would give a ratio of about 32.
        assert seconds(many) / many < 8 * min(seconds(few) for _ in range(5)) / few


class TestSpecialTokens:
    def test_ids_and_lookups(self, any_tokenizer):
        vocab = any_tokenizer.get_vocab()
        assert len(vocab) == any_tokenizer.vocab_size
        assert any_tokenizer.eos_token == "<|im_end|>"
        assert any_tokenizer.eos_token_id == vocab["<|im_end|>"]
        assert any_tokenizer.eos_token_ids == {vocab["<|im_end|>"]}
        assert any_tokenizer.convert_tokens_to_ids(["<|im_start|>", "nothing"]) == [
            vocab["<|im_start|>"],
            None,
        ]

    def test_skip_special_tokens(self, any_tokenizer):
        ids = [*any_tokenizer.encode("the fox"), any_tokenizer.eos_token_id]
        assert any_tokenizer.decode(ids) == "the fox<|im_end|>"
        assert any_tokenizer.decode(ids, skip_special_tokens=True) == "the fox"

    def test_thinking_tags(self, bpe, spms):
        assert (bpe.think_start, bpe.think_end) == tuple(THINK)
        assert [bpe.think_start_id, bpe.think_end_id] == bpe.convert_tokens_to_ids(THINK)
        assert bpe.has_thinking
        assert bpe.decode(bpe.encode("<think>x</think>"), skip_special_tokens=True) == "<think>x</think>"
        assert not spms["exact"].has_thinking
        assert spms["exact"].think_start is spms["exact"].think_end_id is None

    @pytest.mark.parametrize(
        ("generation", "config", "expected"),
        [
            ({"eos_token_id": [1, 2]}, {"eos_token_id": 0}, {1, 2}),
            ({"eos_token_id": 2}, None, {2}),
            ({}, {"eos_token_id": 2}, {1, 2}),
            (None, {"text_config": {"eos_token_id": 2}}, {1, 2}),
            (
                {"eos_token_id": None},
                {"eos_token_id": None, "text_config": {"eos_token_id": [2, 0]}},
                {0, 1, 2},
            ),
            (None, None, {1}),
        ],
    )
    def test_stop_tokens_come_from_the_files(self, bpe_dir, tmp_path, generation, config, expected):
        copy_dir(bpe_dir, tmp_path)
        for name, content in (("generation_config.json", generation), ("config.json", config)):
            if content is not None:
                write_json(tmp_path / name, content)
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer.eos_token_ids == expected
        assert tokenizer.eos_token_id == 1

    def test_stop_token_without_a_name(self, bpe_dir, tmp_path):
        shutil.copy(bpe_dir / "tokenizer.json", tmp_path)
        assert load_tokenizer(tmp_path).eos_token_id is None
        assert load_tokenizer(tmp_path).eos_token_ids == set()
        write_json(tmp_path / "generation_config.json", {"eos_token_id": [2, 1]})
        assert load_tokenizer(tmp_path).eos_token_id == 2
        assert load_tokenizer(tmp_path).eos_token is None

    @pytest.mark.parametrize("entry", ["<|im_end|>", [1, "2"], -1, True, 1.0, {}])
    def test_malformed_stop_token(self, bpe_dir, tmp_path, entry):
        copy_dir(bpe_dir, tmp_path)
        write_json(tmp_path / "generation_config.json", {"eos_token_id": entry})
        with pytest.raises(TokenizerError, match=r"generation_config\.json: eos_token_id is"):
            load_tokenizer(tmp_path)


class TestBos:
    BOS = "<｜begin▁of▁sentence｜>"

    def make(self, path, config, post_processor):
        tokenizer = train_bpe()
        if post_processor:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{self.BOS} $A", special_tokens=[(self.BOS, 3)]
            )
        tokenizer.save(str(path / "tokenizer.json"))
        token = {"__type": "AddedToken", "content": self.BOS}
        write_json(path / "tokenizer_config.json", {"bos_token": token, **config})
        return load_tokenizer(path)

    @pytest.mark.parametrize(
        ("config", "post_processor", "adds"),
        [
            ({}, True, True),
            ({}, False, False),
            ({"add_bos_token": True}, False, True),
            ({"add_bos_token": True}, True, True),
            ({"add_bos_token": False}, True, False),
        ],
    )
    def test_bos_is_added_once_where_the_files_say(self, tmp_path, config, post_processor, adds):
        tokenizer = self.make(tmp_path, config, post_processor)
        bare = tokenizer.encode("hi", add_special_tokens=False)
        assert (tokenizer.bos_token, tokenizer.bos_token_id) == (self.BOS, 3)
        assert 3 not in bare
        assert tokenizer.encode("hi") == ([3, *bare] if adds else bare)

    def test_template_with_bos_gets_no_second_one(self, tmp_path):
        template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token is defined }}"
        tokenizer = self.make(tmp_path, {"add_bos_token": True, "chat_template": template}, True)
        chat = [{"role": "user", "content": "hi"}]
        assert tokenizer.apply_chat_template(chat, tokenize=False) == self.BOS + "hiFalse"
        assert tokenizer.apply_chat_template(chat).count(3) == 1

    def test_special_tokens_map_is_a_fallback(self, bpe_dir, tmp_path):
        shutil.copy(bpe_dir / "tokenizer.json", tmp_path)
        write_json(tmp_path / "special_tokens_map.json", {"eos_token": {"content": "<|im_end|>"}})
        assert load_tokenizer(tmp_path).eos_token_id == 1
        write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<|endoftext|>"})
        assert load_tokenizer(tmp_path).eos_token_id == 2


class TestChat:
    CHAT = [{"role": "user", "content": "the  fox & <ball>"}]
    PROMPT = "<|im_start|>user\nthe  fox & <ball><|im_end|>\n<|im_start|>assistant\n"

    def test_prompt_text_and_tokens(self, any_tokenizer):
        assert any_tokenizer.chat_template == CHATML and any_tokenizer.has_chat_template
        assert any_tokenizer.apply_chat_template(self.CHAT, tokenize=False) == self.PROMPT
        with pytest.raises(RequestError, match="has no continue_final_message; with tokenize=False"):
            any_tokenizer.apply_chat_template(self.CHAT, continue_final_message=True)
        ids = any_tokenizer.apply_chat_template(self.CHAT, return_dict=False)
        assert ids == any_tokenizer.encode(self.PROMPT, add_special_tokens=False)
        closed = any_tokenizer.apply_chat_template(self.CHAT, add_generation_prompt=False, tokenize=False)
        assert closed.endswith("<|im_end|>\n")

    def test_exact_formats_keep_the_prompt(self, bpe, spms):
        for tokenizer in (bpe, spms["exact"]):
            assert tokenizer.decode(tokenizer.apply_chat_template(self.CHAT)) == self.PROMPT

    def test_broken_template_does_no_harm_until_used(self, bpe_dir, tmp_path):
        copy_dir(bpe_dir, tmp_path)
        (tmp_path / "chat_template.jinja").write_text("{% if %}")
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer.decode(tokenizer.encode("fox")) == "fox"
        with pytest.raises(TokenizerError, match="cannot be compiled"):
            tokenizer.apply_chat_template(self.CHAT)

    def test_no_template(self, bpe_dir, tmp_path):
        shutil.copy(bpe_dir / "tokenizer.json", tmp_path)
        bare = load_tokenizer(tmp_path)
        assert bare.chat_template is None and not bare.has_chat_template
        with pytest.raises(TokenizerError, match="--ignore-chat-template"):
            load_tokenizer(tmp_path).apply_chat_template(self.CHAT)


class TestTiktoken:
    """`tiktoken.model` of Kimi models. The goldens are tiktoken's."""

    def test_ids_are_tiktoken_s(self, kimi):
        for golden in json.loads((KIMI / "goldens.json").read_text("utf-8"))["goldens"]:
            assert kimi.encode(golden["text"]) == golden["ids"], golden["text"]
            assert kimi.decode(golden["ids"]) == golden["text"]

    def test_special_tokens_are_those_of_the_files(self, kimi):
        listed = json.loads((KIMI / "tokenizer_config.json").read_text("utf-8"))["added_tokens_decoder"]
        for token_id, entry in listed.items():
            assert kimi.convert_tokens_to_ids(entry["content"]) == int(token_id)
            assert (int(token_id) in kimi.all_special_ids) == entry["special"]
        assert kimi.eos_token_ids == {kimi.convert_tokens_to_ids("[EOS]")}
        first = min(map(int, listed))
        assert (
            kimi.vocab_size == first + 256 and kimi.token_bytes(first + 1) == f"<|reserved_token_{first + 1}|>".encode()
        )

    @QUICK
    @given(text=TEXTS)
    def test_decode_inverts_encode(self, kimi, text):
        assert kimi.decode(kimi.encode(text)) == text

    def test_another_class_cuts_words_in_another_way(self, tmp_path):
        shutil.copy(KIMI / "tiktoken.model", tmp_path)
        write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "QWenTokenizer"})
        with pytest.raises(TokenizerError, match=r"QWenTokenizer.*tokenizer\.json"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize("spoil", [lambda lines: lines[1:], lambda lines: [*lines[:300], *lines[301:]]])
    def test_ranks_that_are_missing(self, tmp_path, spoil):
        lines = (KIMI / "tiktoken.model").read_bytes().splitlines(keepends=True)
        (tmp_path / "tiktoken.model").write_bytes(b"".join(spoil(lines)))
        with pytest.raises(TokenizerError, match="fetch it again"):
            load_tokenizer(tmp_path)


class TestTekken:
    """`tekken.json` of Mistral models. The goldens are mistral_common's."""

    def test_ids_are_mistral_common_s(self, tekken):
        for golden in json.loads((TEKKEN / "goldens.json").read_text("utf-8"))["goldens"]:
            assert tekken.encode(golden["text"]) == golden["ids"], golden["text"]
            assert tekken.encode(golden["text"], add_special_tokens=False) == golden["ids"][1:]
            assert tekken.decode(golden["ids"][1:]) == golden["text"]

    def test_special_tokens_come_first(self, tekken):
        special = json.loads((TEKKEN / "goldens.json").read_text("utf-8"))["special"]
        assert {name: tekken.convert_tokens_to_ids(name) for name in special} == special
        for name, token_id in special.items():
            assert tekken.encode(f"a{name}b", add_special_tokens=False)[1] == token_id
            assert (token_id in tekken.all_special_ids) == (not name.endswith("THINK]"))
        assert (tekken.bos_token, tekken.eos_token, tekken.eos_token_ids) == ("<s>", "</s>", {special["</s>"]})
        assert tekken.think_start_id == special["[THINK]"]

    def test_tokens_beyond_the_size_do_not_count(self, tekken):
        config = json.loads((TEKKEN / "tekken.json").read_text("utf-8"))["config"]
        assert tekken.vocab_size == config["default_vocab_size"] < config["num_vocab_tokens"] + 24

    @QUICK
    @given(text=TEXTS)
    def test_decode_inverts_encode(self, tekken, text):
        assert tekken.decode(tekken.encode(text, add_special_tokens=False)) == text

    @pytest.mark.parametrize(
        "spoil, said",
        [
            (lambda c: c.pop("special_tokens"), "before v11"),
            (lambda c: c.pop("config"), "unknown form"),
            (lambda c: c["vocab"].pop(5), "lacks ranks"),
            (lambda c: c["vocab"][5].update(token_bytes="AA=="), "lacks ranks"),
            (lambda c: c["vocab"][5].update(token_bytes="no base64"), "unknown form"),
            (lambda c: c["config"].update(default_vocab_size=1 << 20), "says"),
            (lambda c: c["config"].update(pattern="(["), "pattern"),
            (lambda c: c["special_tokens"][0].update(rank=99), "says"),
        ],
    )
    def test_damaged(self, tmp_path, spoil, said):
        content = json.loads((TEKKEN / "tekken.json").read_text("utf-8"))
        spoil(content)
        write_json(tmp_path / "tekken.json", content)
        with pytest.raises(TokenizerError, match=said):
            load_tokenizer(tmp_path)

    def test_another_vocabulary_comes_first(self, tmp_path):
        copy_dir(KIMI, tmp_path)
        alone = tokenizer_digest(tmp_path)
        shutil.copy(TEKKEN / "tekken.json", tmp_path)
        assert load_tokenizer(tmp_path).eos_token == "[EOS]" and tokenizer_digest(tmp_path) == alone
        (tmp_path / "tiktoken.model").unlink()
        assert tokenizer_digest(tmp_path) != alone


@pytest.mark.parametrize(
    "files, ends",
    [
        ({"generation_config.json": {"eos_token_id": [400, 401, 402]}}, {400, 401, 402}),  # GLM's, with <|user|>
        ({"generation_config.json": {"eos_token_id": 402}, "config.json": {"eos_token_id": 400}}, {402}),  # Kimi's
        ({"config.json": {"eos_token_id": [401, 402]}}, {401, 402, None}),
    ],
)
def test_ends_of_a_turn_are_those_of_the_files(tmp_path, files, ends):
    copy_dir(KIMI, tmp_path)
    for name, content in files.items():
        write_json(tmp_path / name, content)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids("[EOS]") if end is None else end for end in ends}


class TestBadFiles:
    @pytest.mark.parametrize("listed", [[], {"x": {"content": "a"}}, {"5": {}}, {"5": {"content": 3}}, {"5": "a"}])
    def test_listed_tokens_of_another_form(self, bpe_dir, tmp_path, listed):
        shutil.copy(bpe_dir / "tokenizer.json", tmp_path)
        write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": listed})
        with pytest.raises(TokenizerError, match="added_tokens_decoder"):
            load_tokenizer(tmp_path)

    def test_missing(self, tmp_path):
        for path in (tmp_path, tmp_path / "nowhere"):
            with pytest.raises(TokenizerError, match=r"no tokenizer\.json or .* or tekken\.json"):
                load_tokenizer(path)

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"version": "1.0"}', b"\x00" * 64])
    @pytest.mark.parametrize("name", VOCABULARY_FILES)
    def test_malformed_tokenizer(self, tmp_path, name, content):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TokenizerError, match=name) as caught:
            load_tokenizer(tmp_path)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"3"])
    @pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"])
    def test_malformed_config(self, bpe_dir, tmp_path, name, content):
        copy_dir(bpe_dir, tmp_path)
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TokenizerError, match=name):
            load_tokenizer(tmp_path)

    def test_decoder_not_implemented(self, tmp_path):
        tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        tokenizer.decoder = decoders.Metaspace()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(TokenizerError, match="Metaspace decoder; only ByteLevel and Gemma's"):
            load_tokenizer(tmp_path)

    def test_surrogates_are_refused(self, any_tokenizer):
        with pytest.raises(RequestError, match=r"character 2 of the text is '\\udcff'"):
            any_tokenizer.encode("ab\udcff")


@QUICK
@given(text=TEXTS)
def test_text_after_other_text_begins_with_no_space_of_its_own(any_tokenizer, text):
    def spelled(ids):
        return b"".join(any_tokenizer.token_bytes(token) for token in ids)

    after = any_tokenizer.encode_after(text)
    if any_tokenizer.decode(any_tokenizer.encode(text)) == text:  # spaces were not squeezed
        assert spelled(after).replace("\u2581".encode(), b" ") == text.replace("\u2581", " ").encode()
    assert after == [] or text


def test_long_text_is_encoded_as_short_text_is(bpe, monkeypatch):
    text = "<|im_start|>The owl flew é over\n\n\tthe lake. <think>"
    short = [bpe.encode(text, special) for special in (True, False)]
    monkeypatch.setattr("moeflux_mlx.text.byte_pairs.LONG_TEXT", 0)
    assert [bpe.encode(text, special) for special in (True, False)] == short


def test_text_after_other_text_without_any_marker(spm_dirs):
    tokenizer = load_tokenizer(spm_dirs["prefix"])
    tokenizer.vocabulary.markers = frozenset()
    for text in ("fox", "日fox", "🙂", "", "  x", "qfox"):
        assert b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode_after(text)) == text.encode()


def test_import_is_light():
    heavy = "('tokenizers', 'sentencepiece', 'jinja2', 'transformers', 'mlx_lm')"
    code = f"import sys, moeflux_mlx.text.tokenizer; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def mlx_lm_utils():
    return pytest.importorskip("mlx_lm.tokenizer_utils")


class TestInMlxLm:
    def test_its_wrapper_takes_ours(self, mlx_lm_utils, any_tokenizer):
        wrapper = mlx_lm_utils.TokenizerWrapper(any_tokenizer)
        assert wrapper.eos_token_ids == any_tokenizer.eos_token_ids
        assert wrapper.has_chat_template
        assert wrapper.has_thinking == any_tokenizer.has_thinking
        text = "the fox 🦊 said: naïve!"
        assert "".join(stream(wrapper, wrapper.encode(text))) == text
        chat = TestChat.CHAT
        assert wrapper.apply_chat_template(chat, add_generation_prompt=True) == (
            any_tokenizer.apply_chat_template(chat)
        )

    def test_its_wrapper_takes_our_detokenizer(self, mlx_lm_utils, any_tokenizer):
        wrapper = mlx_lm_utils.TokenizerWrapper(any_tokenizer, lambda tokenizer: tokenizer.detokenizer)
        ids = wrapper.encode("the fox 🦊")
        first, second = wrapper.detokenizer, wrapper.detokenizer
        for token in ids:
            first.add_token(token)
        second.add_token(ids[0])
        first.finalize()
        assert first.last_segment == "the fox 🦊"
        assert second.tokens == ids[:1]

    def test_stream_generate(self, mlx_lm_utils, any_tokenizer):
        import mlx.core as mx
        from mlx_lm.generate import stream_generate

        answer = [*any_tokenizer.encode("the red fox 🦊"), any_tokenizer.eos_token_id]
        prompt = any_tokenizer.encode("Once")
        vocab_size = any_tokenizer.vocab_size

        class Script:
            """A model that answers every prompt with `answer`."""

            layers: list = []

            def __init__(self):
                self.seen = 0

            def make_cache(self):
                return []

            def __call__(self, tokens, cache=None):
                self.seen += tokens.shape[1]
                said = min(self.seen - len(prompt), len(answer) - 1)
                row = mx.where(mx.arange(vocab_size) == answer[max(said, 0)], 0.0, -100.0)
                return mx.broadcast_to(row, (*tokens.shape, vocab_size))

        parts = list(stream_generate(Script(), any_tokenizer, "Once", max_tokens=50))
        assert "".join(part.text for part in parts) == "the red fox 🦊"
        assert parts[-1].finish_reason == "stop"
