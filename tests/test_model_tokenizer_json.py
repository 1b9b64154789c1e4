"""The tokenizer files of Hugging Face folders, in the forms that exporters have written them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minserve.errors import ModelFileError, UnsupportedModelError
from minserve.model.loader import open_model
from minserve.text.vocabulary import Vocabulary

from .support.model_writers import stored, write_safetensors
from .support.tiny_llama import CHAT_TEMPLATE, edit_json, tiny_llama

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BOS_TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
}


def split_steps(regex: str) -> dict[str, Any]:
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_llama().write_hf(tmp_path / "tiny")


def vocabulary_of(folder: Path) -> Vocabulary:
    with open_model(folder) as model:
        return model.vocabulary


def test_merges_as_pairs(folder: Path) -> None:
    """Files of since 2024 write ["a", "b"] instead of "a b"."""
    before = vocabulary_of(folder)
    edit_json(
        folder, "tokenizer.json", lambda c: c["model"].update(merges=[m.split(" ") for m in c["model"]["merges"]])
    )
    assert vocabulary_of(folder).merges == before.merges == list(tiny_llama().vocabulary.merges)


@pytest.mark.parametrize(
    ("pre_tokenizer", "name"),
    [
        ({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}, "gpt2"),
        ({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}, "gpt2"),
        (split_steps(SPLIT), "llama-bpe"),
        (split_steps(SPLIT.replace("{1,3}", "")), "qwen2"),
    ],
)
def test_pre_tokenizers(folder: Path, pre_tokenizer: dict[str, Any], name: str) -> None:
    assert vocabulary_of(folder).pre_tokenizer == "smollm"
    edit_json(folder, "tokenizer.json", lambda c: c.update(pre_tokenizer=pre_tokenizer))
    assert vocabulary_of(folder).pre_tokenizer == name


@pytest.mark.parametrize(
    ("pre_tokenizer", "message"),
    [
        ({"type": "Whitespace"}, "the pre-tokenizer Whitespace is not supported; supported: gpt2, smollm, llama-bpe"),
        ({"type": "ByteLevel", "add_prefix_space": True}, "the pre-tokenizer ByteLevel is not supported"),
        ({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": False}]}, "Digits"),
        (split_steps("[0-9]+"), r"the pre-tokenizer Split '[0-9]+' + ByteLevel is not supported"),
        (None, "the pre-tokenizer None is not supported"),
        ({"type": "Sequence", "pretokenizers": 3}, "the pre-tokenizer Sequence is not supported"),
        ([], "the pre-tokenizer [] is not supported"),
    ],
)
def test_other_pre_tokenizers_are_described(folder: Path, pre_tokenizer: Any, message: str) -> None:
    edit_json(folder, "tokenizer.json", lambda c: c.update(pre_tokenizer=pre_tokenizer))
    with pytest.raises(UnsupportedModelError) as caught:
        open_model(folder)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("processor", "settings", "add_bos"),
    [
        ({"type": "ByteLevel"}, False, False),
        ({"type": "ByteLevel"}, True, True),
        (None, None, False),
        (BOS_TEMPLATE, False, True),
        ({"type": "Sequence", "processors": [{"type": "ByteLevel"}, BOS_TEMPLATE]}, None, True),
        ({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}]}, True, False),
    ],
)
def test_whether_bos_is_added(folder: Path, processor: Any, settings: bool | None, add_bos: bool) -> None:
    """What the tokenizer does counts; what its settings say, only where it does not say."""
    edit_json(folder, "tokenizer.json", lambda c: c.update(post_processor=processor))
    edit_json(folder, "tokenizer_config.json", lambda c: c.update(add_bos_token=settings))
    vocabulary = vocabulary_of(folder)
    assert (vocabulary.add_bos, vocabulary.bos_id) == (add_bos, 1)


@pytest.mark.parametrize(
    ("generation", "config", "named", "expected"),
    [
        ([2, 0], 2, "<|im_end|>", (2, 0)),
        (0, 2, "<|im_end|>", (0, 2)),
        (None, [0, 1], None, (0, 1)),
        (None, None, {"content": "<|endoftext|>", "lstrip": False}, (0,)),
        (None, None, None, ()),
        (None, None, "no such token", ()),
    ],
)
def test_what_ends_an_answer(folder: Path, generation: Any, config: Any, named: Any, expected: tuple[int, ...]) -> None:
    edit_json(folder, "generation_config.json", lambda c: c.update(eos_token_id=generation))
    edit_json(folder, "config.json", lambda c: c.update(eos_token_id=config))
    edit_json(folder, "tokenizer_config.json", lambda c: c.update(eos_token=named))
    assert vocabulary_of(folder).eos_ids == expected


def test_optional_files(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    vocabulary = vocabulary_of(folder)
    assert (vocabulary.bos_id, vocabulary.eos_ids, vocabulary.add_bos, vocabulary.chat_template) == (
        1,
        (2,),
        False,
        None,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"])
def test_a_link_to_nowhere_is_a_missing_file(folder: Path, name: str) -> None:
    """Folders of links into a store lose their targets; a model without its chat template or end tokens still talks."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(folder / "gone")
    with pytest.raises(ModelFileError, match=name):
        open_model(folder)


def test_chat_templates(folder: Path) -> None:
    assert vocabulary_of(folder).chat_template == CHAT_TEMPLATE
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit_json(folder, "tokenizer_config.json", lambda c: c.update(chat_template=named))
    assert vocabulary_of(folder).chat_template == "D"
    edit_json(folder, "tokenizer_config.json", lambda c: c.update(chat_template=named[:1]))
    assert vocabulary_of(folder).chat_template is None
    (folder / "chat_template.jinja").write_text("J\u00e4", encoding="utf-8")
    assert vocabulary_of(folder).chat_template == "J\u00e4"


def test_padding_rows_get_names(folder: Path) -> None:
    """The embedding may have more rows than the tokenizer has tokens; those ids must not become text."""
    edit_json(folder, "config.json", lambda c: c.update(vocab_size=288))
    model = tiny_llama()
    weights = dict(model.weights)
    weights["model.embed_tokens.weight"] = np.zeros((288, 64), np.float32)
    write_safetensors(folder / "model.safetensors", {name: stored(values) for name, values in weights.items()})
    vocabulary = vocabulary_of(folder)
    assert len(vocabulary.tokens) == 288
    assert vocabulary.tokens[286] == b"[PAD286]"
    assert vocabulary.special_tokens["[PAD286]"] == 286


def test_added_tokens_beyond_the_bpe_vocabulary(folder: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
            del content["model"]["vocab"][name]

    edit_json(folder, "tokenizer.json", change)
    assert list(vocabulary_of(folder).tokens) == list(tiny_llama().vocabulary.tokens)


TOKENIZER_FAULTS: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "unigram": ("tokenizer.json", lambda c: c["model"].update(type="Unigram"), "model 'Unigram' is not supported"),
    "byte fallback": ("tokenizer.json", lambda c: c["model"].update(byte_fallback=True), "BPE with byte_fallback"),
    "prefix": ("tokenizer.json", lambda c: c["model"].update(continuing_subword_prefix="##"), "continuing_subword"),
    "normalizer": (
        "tokenizer.json",
        lambda c: c.update(normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend"}, {"type": "Replace"}]}),
        "the text normalizer Prepend + Replace is not supported",
    ),
    "no model": ("tokenizer.json", lambda c: c.pop("model"), "model must be of kind dict, not None"),
    "no vocabulary": ("tokenizer.json", lambda c: c["model"].pop("vocab"), "model.vocab must be of kind dict"),
    "no merges": ("tokenizer.json", lambda c: c["model"].pop("merges"), "model.merges must be of kind list"),
    "merge of three": (
        "tokenizer.json",
        lambda c: c["model"]["merges"].append("a b c"),
        "merge 25 is 'a b c', not two",
    ),
    "merge of numbers": (
        "tokenizer.json",
        lambda c: c["model"]["merges"].append([1, 2]),
        "merge 25 is [1, 2], not two",
    ),
    "merge not in the alphabet": (
        "tokenizer.json",
        lambda c: c["model"]["merges"].append(["\u4f60", "a"]),
        "byte alphabet",
    ),
    "id too large": (
        "tokenizer.json",
        lambda c: c["model"]["vocab"].update(zz=284),
        "the token 'zz' has the id 284; the config's vocab_size allows 0 to 283",
    ),
    "id of text": ("tokenizer.json", lambda c: c["model"]["vocab"].update(zz="1"), "the token 'zz' has the id '1'"),
    "id below 0": ("tokenizer.json", lambda c: c["model"]["vocab"].update(zz=-1), "the token 'zz' has the id -1"),
    "id twice": (
        "tokenizer.json",
        lambda c: c["model"]["vocab"].update(zz=5),
        "the id 5 belongs to 'zz' and to another",
    ),
    "token not in the alphabet": (
        "tokenizer.json",
        lambda c: c["model"]["vocab"].update({"a b": c["model"]["vocab"].pop("a")}),
        "byte alphabet",
    ),
    "added token without id": ("tokenizer.json", lambda c: c["added_tokens"].append({"content": "x"}), "the id of 'x'"),
    "added token that is a number": (
        "tokenizer.json",
        lambda c: c["added_tokens"].append(3),
        "added_tokens must be of",
    ),
    "added token that is half a character": (
        "tokenizer.json",
        lambda c: c["added_tokens"][0].update(content="\ud800"),
        r"the added token '\ud800' is not text",
    ),
    "bos is another": (
        "tokenizer.json",
        lambda c: c.update(
            post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[CLS]"}}]}
        ),
        "it puts '[CLS]' before a prompt, not the BOS token",
    ),
    "a token after the prompt": (
        "tokenizer.json",
        lambda c: c.update(
            post_processor={**BOS_TEMPLATE, "single": [*BOS_TEMPLATE["single"], {"SpecialToken": {"id": "<|im_end|>"}}]}
        ),
        "it puts special tokens after a prompt",
    ),
    "eos out of range": (
        "generation_config.json",
        lambda c: c.update(eos_token_id=[2, 284]),
        "the token id 284 is not one of 0 to 283",
    ),
    "eos of text": ("generation_config.json", lambda c: c.update(eos_token_id="2"), "the token id '2' is not one of"),
    "template": ("tokenizer_config.json", lambda c: c.update(chat_template=7), "chat_template must be text, not 7"),
}


@pytest.mark.parametrize("name", TOKENIZER_FAULTS)
def test_tokenizer_faults(folder: Path, name: str) -> None:
    file_name, change, message = TOKENIZER_FAULTS[name]
    edit_json(folder, file_name, change)
    with pytest.raises((ModelFileError, UnsupportedModelError)) as caught:
        open_model(folder)
    assert message in str(caught.value)
    assert str(folder / file_name) in str(caught.value)
    str(caught.value).encode()


def nested(depth: int) -> Any:
    """A sequence of a sequence of ..., as deep as JSON readers let through."""
    value: Any = {"type": "Sequence", "pretokenizers": []}
    for _ in range(depth):
        value = {"type": "Sequence", "pretokenizers": [value]}
    return value


@pytest.mark.parametrize("key", ["normalizer", "pre_tokenizer", "post_processor", "added_tokens", "model"])
def test_deeply_nested_parts(folder: Path, key: str) -> None:
    """What cannot be described in a line must not be described by recursion."""
    value = [nested(200)] if key == "added_tokens" else nested(200)
    edit_json(folder, "tokenizer.json", lambda c: c.update({key: value}))
    with pytest.raises((ModelFileError, UnsupportedModelError)) as caught:
        open_model(folder)
    assert len(str(caught.value)) < 600
