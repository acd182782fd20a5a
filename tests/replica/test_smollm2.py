"""The real model against `transformers` on the same dequantized weights."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from replica.batch import ForwardBatch
from replica.errors import OfflineError
from replica.gguf_file import GgufFile
from replica.models import load_model, load_tokenizer, resolve
from replica.weights_gguf import GgufWeights, gguf_config

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.model, pytest.mark.slow]

NAME = "smollm2-135m"
BLOCK = 16
NEW_TOKENS = 64
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List three prime numbers.",
    "Translate 'good morning' into German.",
    "def fibonacci(n):",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet?",
    "2 + 2 * 3 = ?",
    "Summarize: the cat sat on the mat and slept.",
    "Name a planet with rings.",
    "How do bees make honey?",
    "Once upon a time",
    "Convert 10 km to miles.",
    "Erkläre mir die Relativitätstheorie.",
    "你好，你是谁？",
    "SELECT name FROM users WHERE",
    "What is the opposite of hot?",
    "The quick brown fox",
]


@pytest.fixture(scope="module")
def path():
    try:
        return resolve(NAME)
    except OfflineError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(path):
    return load_tokenizer(NAME)


@pytest.fixture(scope="module")
def ours(path):
    model, _ = load_model(NAME)
    model.allocate_kv(256, BLOCK)
    return model


@pytest.fixture(scope="module")
def theirs(path):
    file = GgufFile(path)
    shape = gguf_config(file)
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.context_length,
        rms_norm_eps=shape.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    weights = GgufWeights(file, shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.get(name))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts(tokenizer):
    plain, chat = QUESTIONS[::2], QUESTIONS[1::2]
    texts = [tokenizer.encode_text(text) for text in plain]
    return texts + [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in chat]


def tables(lengths):
    starts = np.cumsum([0, *(-(-n // BLOCK) for n in lengths)])
    return [np.arange(a, b) for a, b in pairwise(starts)]


def every_logit(model, ids, table):
    batch = ForwardBatch.build([(ids, 0, table, True)], BLOCK)
    return model.forward(ForwardBatch(**{**vars(batch), "logit_rows": np.arange(len(ids))}))


def test_logits_of_twenty_prompts(ours, theirs, tokenizer):
    for ids in prompts(tokenizer):
        actual = every_logit(ours, ids, np.arange(9, 9 + -(-len(ids) // BLOCK)))
        with torch.inference_mode():
            expected = theirs(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        assert (actual - expected).abs().max() < 1e-3


def greedy_batch(model, batch_prompts, count):
    """All prompts prefilled one by one, then decoded together."""
    places = tables([len(ids) + count for ids in batch_prompts])
    rows = [
        model.forward(ForwardBatch.build([(p, 0, t, True)], BLOCK))[0]
        for p, t in zip(batch_prompts, places, strict=True)
    ]
    answers = [[int(row.argmax())] for row in rows]
    for step in range(count - 1):
        work = [
            (np.array(answer[-1:]), len(ids) + step, table, True)
            for answer, ids, table in zip(answers, batch_prompts, places, strict=True)
        ]
        for answer, row in zip(answers, model.forward(ForwardBatch.build(work, BLOCK)), strict=True):
            answer.append(int(row.argmax()))
    return answers


def test_greedy_answers_batched_here_alone_there(ours, theirs, tokenizer):
    """One pass over prompt and answer shows what `transformers` would have chosen at every step."""
    chosen = prompts(tokenizer)
    for ids, answer in zip(chosen, greedy_batch(ours, chosen, NEW_TOKENS), strict=True):
        text = torch.from_numpy(np.concatenate([ids, answer]).astype(np.int64))[None]
        with torch.inference_mode():
            choices = theirs(text).logits[0].argmax(-1)
        assert answer == choices[len(ids) - 1 : -1].tolist()


def test_generate_agrees(ours, theirs, tokenizer):
    ids = prompts(tokenizer)[-1]
    with torch.inference_mode():
        text = torch.from_numpy(ids.astype(np.int64))[None]
        expected = theirs.generate(text, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert greedy_batch(ours, [ids], NEW_TOKENS)[0] == expected[0, len(ids) :].tolist()


def test_long_context_and_chunks(ours, tokenizer):
    ids = np.resize(tokenizer.encode_text(" ".join(QUESTIONS)), 1100)
    table = np.arange(0, 70)
    whole = ours.forward(ForwardBatch.build([(ids, 0, table, True)], BLOCK))
    scattered = table[::-1] + 100
    for start in range(0, 1100, 300):
        part = (ids[start : start + 300], start, scattered, True)
        chunked = ours.forward(ForwardBatch.build([part], BLOCK))
    assert (whole - chunked).abs().max() < 1e-3


def test_token_ids(tokenizer):
    """Ids as Hugging Face's tokenizer.json of SmolLM2 gives them: digits one by one, then GPT-2's pattern."""
    assert tokenizer.encode_text("Hello world").tolist() == [19556, 905]
    assert tokenizer.encode_text("<|im_start|>user\n").tolist() == [1, 4093, 198]
    digits = [tokenizer.encode_text(digit)[0] for digit in "1234567890"]
    assert tokenizer.encode_text("1234567890").tolist() == digits
    assert (tokenizer.vocab_size, tokenizer.context_length, tokenizer.eos_ids) == (49152, 8192, {0, 2})


def test_chat_prompt(tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    rendered = (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.render_chat(messages) == rendered
    assert tokenizer.decode(tokenizer.encode_chat(messages), skip_special=False) == rendered
    own = tokenizer.render_chat([{"role": "system", "content": "S"}, *messages])
    assert own.startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user")


def test_the_next_turn_extends_the_tokens_of_the_last(tokenizer):
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    first = tokenizer.encode_chat(messages[:1]).tolist()
    answer = [*tokenizer.encode_text("two").tolist(), 2]
    longer = tokenizer.encode_chat([*messages, {"role": "user", "content": "three"}]).tolist()
    assert longer[: len(first) + len(answer)] == first + answer
