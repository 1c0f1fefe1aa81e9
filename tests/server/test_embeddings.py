"""Embeddings beside the chat model: those of mlx-vlm, by OpenAI's client and over Ollama's path."""

import asyncio
import base64
import gc
import json
import threading
import types
import weakref

import mlx.core as mx
import numpy as np
import openai
import pytest
from live_server import FakeEngine, Live, wait_for
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from moeflux_mlx import serve
from moeflux_mlx.errors import BadRequestError, ModelFileError
from moeflux_mlx.opening.load_settings import LoadSettings
from moeflux_mlx.ops import backend
from moeflux_mlx.server import embedder as module
from moeflux_mlx.server.embedder import Embedder, check_size, compute, is_installed, memory_of

pytestmark = pytest.mark.skipif(not is_installed(), reason="mlx-vlm or transformers is not installed")
MARKS, TEXT = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"], "the owl lake flew over and Mira saw a story of"
WORDS = [*MARKS, *TEXT.split()]
TEXTS = ["the owl", "Mira saw the lake and the owl flew over the lake", "a story of the owl and Mira"]
QWEN3 = {"model_type": "qwen3", "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 10000}
QWEN3 |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "max_position_embeddings": 64}
BERT = {"model_type": "bert", "num_hidden_layers": 2, "type_vocab_size": 2, "layer_norm_eps": 1e-12}
BERT |= {"max_position_embeddings": 64, "hidden_act": "gelu"}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": len(WORDS)}


def checkpoint(path, config, pooling):
    """Writes a tiny embedding model with random weights."""
    from mlx_vlm.embedding_loader import EMBEDDING_MODEL_REMAPPING
    from mlx_vlm.utils import get_model_and_args

    path.mkdir(parents=True, exist_ok=True)
    config = {**config, **SIZES, "pad_token_id": 0}
    (path / "config.json").write_text(json.dumps(config))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    kind = EMBEDDING_MODEL_REMAPPING.get(config["model_type"], config["model_type"])
    family, _ = get_model_and_args(config={**config, "model_type": kind})
    model = family.Model(family.ModelConfig.from_dict({**config, "model_type": kind}))
    mx.random.seed(3)
    weights = {name: mx.random.normal(value.shape) * 0.3 for name, value in tree_flatten(model.parameters())}
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module", params=[(QWEN3, "lasttoken"), (BERT, "mean_tokens")], ids=["qwen3", "bert"])
def path(request, tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("embedding"), *request.param)


@pytest.fixture(scope="module")
def live(path):
    with Live(lambda: FakeEngine(lambda prompt: "</think>" + "word " * 200, token_seconds=0.002)) as live:
        live.served.embedder = Embedder("owls", path, lambda: live.models.is_computing)
        yield live
        assert live.served.embedder.stop(10)


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def by_mlx_vlm(path, texts):
    """Returns what mlx-vlm's own server computes, which pads with transformers' tokenizer."""
    from mlx_vlm.embedding_loader import load_embedding_model
    from mlx_vlm.models.pooling import read_pooling_config
    from transformers import PreTrainedTokenizerFast

    model = load_embedding_model(path)
    model.pooling_config = read_pooling_config(path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"), pad_token="[PAD]")
    encoded = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="np")
    ids, mask = mx.array(encoded["input_ids"]), mx.array(encoded["attention_mask"])
    return np.array(model(ids, attention_mask=mask).text_embeds), int(encoded["attention_mask"].sum())


def test_the_model_is_listed_and_read_at_the_first_request(live, client):
    assert {one["id"]: one.get("embedding", False) for one in json.loads(live.get("/v1/models"))["data"]} == {
        "tiny": False,
        "owls": True,
    }
    embedder = live.served.embedder
    assert embedder.state == "unloaded" and memory_of(embedder._path) > embedder.nbytes / 2
    client.embeddings.create(model="owls", input="the owl")
    status = json.loads(live.get("/v1/models/owls"))["status"]
    assert embedder.state == status["value"] == "loaded"
    assert live.post("/api/show", {"model": "owls"})["capabilities"] == ["embedding"]


def test_vectors_are_those_of_mlx_vlm(path, client):
    expected, tokens = by_mlx_vlm(path, TEXTS)
    reply = client.embeddings.create(model="any", input=TEXTS, encoding_format="float")
    made = np.array([one.embedding for one in reply.data])
    assert np.abs(made - expected).max() < 1e-4 and reply.usage.prompt_tokens == reply.usage.total_tokens == tokens
    for text, vector in zip(TEXTS, made, strict=True):
        alone = client.embeddings.create(model="any", input=text, encoding_format="float").data[0].embedding
        assert np.abs(by_mlx_vlm(path, [text])[0][0] - alone).max() < 1e-4
        assert np.abs(np.array(alone) - vector).max() < 1e-4 and np.linalg.norm(alone) == pytest.approx(1, abs=1e-4)


def test_forms_of_inputs_and_vectors(live, client, monkeypatch):
    monkeypatch.setattr(module, "PIECE_TOKENS", 8)  # several pieces, and the order stays
    plain = client.embeddings.create(model="m", input=TEXTS, encoding_format="float").data
    bytes_of = live.post("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"})["data"]
    packed = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in bytes_of]
    assert np.array_equal(packed, np.array([one.embedding for one in plain], np.float32))
    ids = [live.served.embedder._tokenizer.encode(text).ids for text in TEXTS]
    by_ids = client.embeddings.create(model="m", input=ids, encoding_format="float").data
    assert [one.embedding for one in by_ids] == [one.embedding for one in plain]
    (one,) = client.embeddings.create(model="m", input=ids[1], encoding_format="float").data
    assert np.abs(np.array(one.embedding) - plain[1].embedding).max() < 1e-4
    cut = client.embeddings.create(model="m", input=TEXTS[0], dimensions=8, encoding_format="float").data[0].embedding
    head = np.array(plain[0].embedding[:8])
    assert np.abs(cut - head / np.linalg.norm(head)).max() < 1e-4
    embedded = live.post("/api/embed", {"model": "m", "input": TEXTS})
    assert embedded["embeddings"] == [one.embedding for one in plain] and embedded["prompt_eval_count"] > 0


REFUSED = [
    ({}, "input is missing"),
    ({"input": ""}, r"input\[0\] is empty"),
    ({"input": [["the"]]}, "input is "),
    ({"input": [1, 99]}, r"input\[0\] has token 99; the largest is"),
    ({"input": "owl " * 63}, r"input\[0\] has 65 tokens and this embedding model takes 64"),
    ({"input": "owl" + " " * 5000 + "lake"}, r"input\[0\] has 5007 characters and this .* takes 64 tokens"),
    ({"input": "owl", "dimensions": 99}, "dimensions is 99; this model has 32"),
    ({"input": "owl", "encoding_format": "int8"}, "encoding_format is 'int8'; expected float or base64"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED, ids=[message[:24] for _, message in REFUSED])
def test_what_cannot_be_embedded_is_refused(client, body, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.post("/embeddings", body=body, cast_to=object)


def test_ollama_cuts_long_texts(live):
    short = live.post("/api/embed", {"model": "m", "input": " ".join(["owl"] * 62)})
    assert live.post("/api/embed", {"model": "m", "input": "owl " * 100})["embeddings"] == short["embeddings"]
    longest = live.post("/v1/embeddings", {"input": "owl " * 62, "encoding_format": "float"})["data"]
    assert [longest[0]["embedding"]] == short["embeddings"]


def test_ollamas_own_client_embeds(live):
    library = pytest.importorskip("ollama", reason="the Python client of Ollama is not installed")
    with library.Client(host=live.url) as client:
        reply = client.embed("owls", TEXTS, dimensions=8)
    assert [len(one) for one in reply.embeddings] == [8] * 3 and reply.prompt_eval_count > 8


def test_answers_go_on_beside_embeddings(live, client):
    """While an answer is written, the thread rests for most of the time."""
    texts, rests = [TEXTS[1]] * 64, []
    answering = threading.Thread(target=live.post, args=["/v1/completions", {"prompt": "x", "max_tokens": 400}])
    answering.start()
    wait_for(lambda: live.models.is_computing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.time, "sleep", rests.append)
        assert len(client.embeddings.create(model="m", input=texts).data) == 64
    assert len(rests) >= 1
    answering.join()


def test_without_a_model_the_path_says_how_to_get_one():
    with (
        Live(lambda: FakeEngine(lambda prompt: "x")) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match="start it with --embedding-model"),
    ):
        client.embeddings.create(model="m", input="owl")


class Noted(dict):
    """Notes the threads in which it becomes JSON."""

    threads = []  # noqa: RUF012

    def items(self):
        self.threads.append(threading.current_thread())
        return super().items()


def test_replies_are_written_beside_the_event_loop(live):
    async def embeds(*_, **more):
        return types.SimpleNamespace(tolist=lambda: Noted(one=1)), 1

    right, live.served.embedder = live.served.embedder, embeds
    embeds.name = "owls"
    try:
        assert live.post("/api/embed", {"model": "m", "input": "owl"})["embeddings"] == {"one": 1}
    finally:
        live.served.embedder = right
    assert Noted.threads and live.thread not in Noted.threads


def test_values_that_are_no_numbers_and_too_many_are_refused():
    def model(value):
        return lambda ids, attention_mask: types.SimpleNamespace(text_embeds=mx.full((len(ids), 4), value))

    assert len(compute(model(0.5), [[1], [1, 2]], 0)) == 2
    with pytest.raises(BadRequestError, match="values that are not finite"):
        compute(model(float("nan")), [[1]], 0)
    check_size(2048, 2048)
    with pytest.raises(BadRequestError, match="input has 2048 texts; .* at most 1365 of 3072 values"):
        check_size(2048, 3072)


def test_the_thread_rests_before_a_piece_and_not_before_an_answer(path):
    asked = []
    embedder = Embedder("owls", path, lambda: asked.append(1) or True)

    async def ask():
        await embedder(["owl"])
        first = len(asked)
        await embedder(["owl"])
        return first

    first = asyncio.run(ask())
    assert first == 1 and len(asked) > 2, "the second request waits for the rest of the first"
    assert embedder.stop(10)


class Text(str):
    """A text that can be referred to weakly."""


def test_what_a_client_that_left_has_sent_is_not_kept(path):
    goes_on = threading.Event()

    async def leaves():
        first = asyncio.ensure_future(embedder(["owl"]))
        left = asyncio.ensure_future(embedder([text := Text("the lake")]))
        sent = weakref.ref(text)
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        del left, text
        gc.collect()
        is_kept = sent() is not None
        goes_on.set()
        await first
        return is_kept

    embedder = Embedder("owls", path, lambda: not goes_on.wait(30))
    assert not asyncio.run(leaves())
    assert embedder.stop(10)


def test_its_memory_is_part_of_the_plan(path, tmp_path):
    options = serve.parser().parse_args(["--embedding-model", str(path)])
    assert serve.embedding_of(options) == path and options.beside == memory_of(path)
    from moeflux_mlx.cli.options import settings_of

    options.model = None
    assert settings_of(options).beside == memory_of(path) > (path / "model.safetensors").stat().st_size
    assert LoadSettings().beside == 0
    with pytest.raises(ModelFileError, match="holds no embedding model"):
        memory_of(tmp_path)


@pytest.mark.skipif(backend.has_kernels(), reason="a kernel holds no scores")
def test_the_scores_of_the_longest_text_are_part_of_its_memory(tmp_path):
    def planned(longest):
        config = {"num_attention_heads": 2, "max_position_embeddings": longest}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return memory_of(tmp_path)

    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"{}")
    assert planned(8192) - planned(64) == 4 * 2 * (8192**2 - 64**2)
    read = {"num_attention_heads": 2, "max_position_embeddings": 8192}
    assert memory_of(tmp_path, read) - planned(64) == 4 * 2 * (8192**2 - 64**2), "the file is not read again"
