"""Who may start from whose blocks: only a request that is equal in everything that decides what a block holds."""

from __future__ import annotations

from array import array
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve import LLM, Request, SamplingParams
from minserve.engine.llm_engine import LLMEngine
from minserve.errors import ParameterError
from minserve.events import BlockAllocated, BlockShared
from minserve.kv.cache_identity import CacheIdentity
from minserve.kv.prefix_cache import PrefixCache
from minserve.ops import native

from .support.scripted_model import engine, request, run_to_the_end, saying, serve
from .support.tiny_llama import tiny_llama

OF_THE_ENGINE = ("model_revision", "tokenizer", "quantization", "kv_cache_dtype")
OF_THE_REQUEST = ("model", "adapter", "template", "system_policy", "tenant", "cache_salt")
PROMPT = "0123456789ab"  # three blocks of four, of which two can be a hit
WORDS = st.one_of(st.none(), st.text(max_size=4))
IDENTITIES = st.builds(CacheIdentity, **dict.fromkeys((*OF_THE_ENGINE, *OF_THE_REQUEST), WORDS))


def test_the_fields_are_these() -> None:
    """Whoever adds a field adds it to one of the two lists above, and with that to the tests below."""
    assert {field.name for field in fields(CacheIdentity)} == {*OF_THE_ENGINE, *OF_THE_REQUEST}


def cached_tokens(eng: LLMEngine, name: str, **about: object) -> int:
    (output,) = serve(eng, request(PROMPT, name, fields=about))
    assert output.outputs[0].text == "fine"
    return output.metrics.num_cached_tokens


@pytest.mark.parametrize("field", OF_THE_REQUEST)
def test_a_field_of_the_request_alone_makes_a_miss(field: str) -> None:
    eng = engine(saying("fine"))
    assert cached_tokens(eng, "plain") == 0
    assert cached_tokens(eng, "plain again") == 8
    assert cached_tokens(eng, "other", **{field: "other"}) == 0
    assert cached_tokens(eng, "other again", **{field: "other"}) == 8
    assert cached_tokens(eng, "third", **{field: "third"}) == 0
    assert cached_tokens(eng, "plain once more") == 8
    if field != "tenant":  # nobody and the empty name are two
        assert cached_tokens(eng, "empty", **{field: ""}) == 0


@pytest.mark.parametrize("field", OF_THE_ENGINE)
def test_a_field_of_the_engine_alone_makes_a_miss(field: str) -> None:
    """As if the engine went on with other weights, or another KV dtype, over the same pool."""
    eng = engine(saying("fine"), identity=CacheIdentity(model_revision="r", tokenizer="t", quantization="q"))
    assert [cached_tokens(eng, "a"), cached_tokens(eng, "b")] == [0, 8]
    before, eng.identity = eng.identity, replace(eng.identity, **{field: "other"})  # type: ignore[arg-type]
    assert [cached_tokens(eng, "c"), cached_tokens(eng, "d")] == [0, 8]
    eng.identity = before
    assert cached_tokens(eng, "e") == 8


@given(one=IDENTITIES, other=IDENTITIES)
def test_digests_are_equal_only_where_all_fields_are(one: CacheIdentity, other: CacheIdentity) -> None:
    assert (one.digest() == other.digest()) == (one == other)


@given(
    words=st.lists(st.text("ab\0", max_size=3), min_size=2, max_size=2),
    cut=st.integers(0, 6),
    names=st.lists(st.sampled_from(OF_THE_REQUEST), min_size=2, max_size=2, unique=True),
)
def test_no_value_passes_for_a_part_of_another(words: list[str], cut: int, names: list[str]) -> None:
    """("a", "bc") is not ("ab", "c"), and a value under one name is not the same under another."""
    joined = "".join(words)
    one = CacheIdentity(**dict(zip(names, words, strict=True)))
    other = CacheIdentity(**dict(zip(names, (joined[:cut], joined[cut:]), strict=True)))
    assert (one.digest() == other.digest()) == (one == other)
    crossed = CacheIdentity(**dict(zip(names, reversed(words), strict=True)))
    assert (one.digest() == crossed.digest()) == (words[0] == words[1])


@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=2, max_size=2),
    roots=st.lists(st.sampled_from([b"x" * 32, b"y" * 32]), min_size=2, max_size=2),
)
def test_a_block_hash_stands_for_everything_before_it(texts: list[list[int]], roots: list[bytes]) -> None:
    """Two hashes are equal exactly if the root and all tokens up to the block's end are."""
    cache = PrefixCache(2)
    hashes: list[list[bytes]] = [[], []]
    for own, root, text in zip(hashes, roots, texts, strict=True):
        cache.extend_hashes(own, root, array("i", text), len(text) // 2)
    for i, first in enumerate(hashes[0]):
        for j, second in enumerate(hashes[1]):
            same = roots[0] == roots[1] and texts[0][: 2 * i + 2] == texts[1][: 2 * j + 2]
            assert (first == second) == same


@given(
    askers=st.lists(
        st.tuples(st.sampled_from("ABC"), st.sampled_from([None, "s"]), st.integers(1, 14), st.integers(0, 3)),
        min_size=2,
        max_size=12,
    ),
    blocks=st.integers(6, 30),
)
def test_two_tenants_never_share(askers: list[tuple[str, str | None, int, int]], blocks: int) -> None:
    """Any mix of tenants and salts with beginnings of one prompt, in any pool: a block that one of them filled is never
    given to another as a hit; and each of them alone does share."""
    eng = engine(saying("fine"), blocks=blocks, budget=7, max_num_seqs=4)
    owner: dict[str, tuple[str, str | None]] = {}
    filled_by: dict[int, tuple[str, str | None]] = {}
    crossed: list[object] = []

    def allocated(event: BlockAllocated) -> None:
        filled_by.update(dict.fromkeys(event.blocks, owner[event.request_id]))

    def shared(event: BlockShared) -> None:
        crossed.extend(block for block in event.blocks if filled_by[block] != owner[event.request_id])

    eng.events.subscribe(allocated, [BlockAllocated])
    eng.events.subscribe(shared, [BlockShared])
    for i, (tenant, salt, length, pause) in enumerate(askers):
        owner[f"r{i}"] = (tenant, salt)
        eng.add_request(request((PROMPT + "cd")[:length], f"r{i}", fields={"tenant": tenant, "cache_salt": salt}))
        for _ in range(pause):
            eng.step()
    run_to_the_end(eng)
    assert not crossed


def test_turned_off_nothing_is_kept() -> None:
    eng = engine(saying("fine"), enable_prefix_caching=False)
    assert [cached_tokens(eng, "a"), cached_tokens(eng, "b")] == [0, 0]
    assert eng.blocks.pool.num_cached == 0


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(seed=1).write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", "Q8_0")


def test_a_template_and_plain_text_with_the_same_tokens(tiny_path: Path) -> None:
    """A conversation's tokens, sent as raw ids, are not the conversation: another template may stand behind them."""
    llm = LLM(tiny_path, backend="numpy", block_size=4)
    once = SamplingParams(temperature=0, max_tokens=1)
    messages = [{"role": "user", "content": "hello and the other"}]
    cold, warm = llm.chat(messages, once)[0], llm.chat(messages, once)[0]
    raw = llm.generate(cold.prompt_token_ids, once)[0]
    again = llm.generate(cold.prompt_token_ids, once)[0]
    salted = llm.chat(messages, once, cache_salt="mine")[0]
    full = (len(cold.prompt_token_ids) - 1) // 4 * 4
    found = [output.metrics.num_cached_tokens for output in (cold, warm, raw, again, salted)]
    assert found == [0, full, 0, full, 0]


def test_what_an_llm_says_of_itself(tiny_path: Path, tmp_path: Path) -> None:
    """Another file, another tokenizer, another type of weights, backend or KV dtype: another identity each; the same
    file once more: the same one."""
    first = LLM(tiny_path, backend="numpy").engine.identity
    assert all(getattr(first, name) for name in OF_THE_ENGINE)
    assert LLM(tiny_path, backend="numpy").engine.identity == first
    variants = {
        "weights": LLM(tiny_llama(seed=2).write_gguf(tmp_path / "other.gguf", "Q8_0"), backend="numpy"),
        "quantization": LLM(tiny_llama(seed=1).write_gguf(tmp_path / "f32.gguf", "F32"), backend="numpy"),
        "tokenizer": LLM(
            tiny_llama(seed=1, pre_tokenizer="gpt2").write_gguf(tmp_path / "gpt2.gguf", "Q8_0"), backend="numpy"
        ),
        "kv": LLM(tiny_path, backend="numpy", kv_cache_dtype="float16"),
    }
    if native.why_unavailable() is None:
        variants["backend"] = LLM(tiny_path, backend="c", kv_cache_dtype="float32")
    ids = {name: llm.engine.identity for name, llm in variants.items()}
    assert len({first.digest(), *(identity.digest() for identity in ids.values())}) == 1 + len(ids)
    assert ids["weights"].model_revision != first.model_revision
    assert ids["quantization"].quantization != first.quantization
    assert ids["tokenizer"].tokenizer != first.tokenizer
    assert ids["kv"].kv_cache_dtype != first.kv_cache_dtype


def test_a_request_is_one_whose_fields_are_read() -> None:
    """`of` takes every field that a request has, and keeps the engine's own."""
    about = {name: f"its {name}" for name in OF_THE_REQUEST}
    own = CacheIdentity(**{name: f"our {name}" for name in OF_THE_ENGINE})
    identity = own.of(Request("r", [1], SamplingParams(), **about))  # type: ignore[arg-type]
    assert identity == replace(own, **about)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["tenant", "cache_salt", "adapter", "model", "template", "system_policy"])
def test_what_is_no_text_is_refused(field: str) -> None:
    """Tenant 1 and tenant "1" were one, since a number was written as its text."""
    eng = engine(saying("x"))
    with pytest.raises(ParameterError, match=field):
        eng.add_request(request("hi", fields={field: 1}))
