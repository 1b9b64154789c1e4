"""A Hugging Face folder's tokenizer files as a Vocabulary.

tokenizer.json has the vocabulary, merges and how text is cut; tokenizer_config.json the chat
template and the names of control tokens; generation_config.json what ends an answer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from minserve.errors import ModelFileError, UnsupportedModelError
from minserve.model.json_file import read_object, read_text, shown, typed
from minserve.model.token_spelling import token_bytes
from minserve.text.vocabulary import Vocabulary

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_BYTES_ONLY = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_DIGITS = {"type": "Digits", "individual_digits": True}
_TIKTOKEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(digits: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": _TIKTOKEN_PATTERN % digits}, "behavior": "Isolated", "invert": False}


# How each pre-tokenizer looks in a tokenizer.json: the steps of a sequence.
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt2": [_BYTE_LEVEL],
    "smollm": [_DIGITS, _BYTE_LEVEL],
    "llama-bpe": [_split("{1,3}"), _BYTES_ONLY],
    "qwen2": [_split(""), _BYTES_ONLY],
}


def read_vocabulary(folder: Path, config: dict[str, Any], vocab_size: int) -> Vocabulary:
    """The folder's tokenizer. config: the parsed config.json, whose token ids are used if no other file has any.

    Ids below vocab_size that the tokenizer does not use (padding rows of the embedding) become
    special tokens called [PAD<id>].
    Raises ModelFileError for a damaged file and UnsupportedModelError, saying what is in the way,
    for a tokenizer that is not byte-level BPE with a known pre-tokenizer.
    """
    path = folder / "tokenizer.json"
    content = read_object(path)
    settings = _optional(folder / "tokenizer_config.json")
    model = typed(content.get("model"), dict, path, "model")
    _check_model(path, content, model)

    spellings: dict[str, int] = typed(model.get("vocab"), dict, path, "model.vocab")
    special = _added_tokens(path, content)
    tokens: list[bytes | None] = [None] * vocab_size
    for spelling, token_id in spellings.items():
        _place(path, tokens, token_id, spelling)
        if spelling not in special:
            tokens[token_id] = token_bytes(path, spelling)
    for name, token_id in special.items():
        data = _utf8(path, name)
        _place(path, tokens, token_id, name)
        tokens[token_id] = data
    for token_id, token in enumerate(tokens):
        if token is None:
            name = f"[PAD{token_id}]"
            special[name] = token_id
            tokens[token_id] = name.encode("utf-8")

    def token_id_of(name: object) -> int | None:
        if isinstance(name, dict):  # a token may be written out with its properties
            name = name.get("content")
        return special.get(name, spellings.get(name)) if isinstance(name, str) else None

    bos_id = token_id_of(settings.get("bos_token"))
    if bos_id is None:
        bos_id = next(iter(_ids(folder / "config.json", config.get("bos_token_id"), vocab_size)), None)
    generation_path = folder / "generation_config.json"
    generation = _optional(generation_path)
    ends = _ids(generation_path, generation.get("eos_token_id"), vocab_size)
    ends = ends or _ids(folder / "config.json", config.get("eos_token_id"), vocab_size)
    named_end = token_id_of(settings.get("eos_token"))
    if named_end is not None:
        ends.append(named_end)
    return Vocabulary(
        tokens=[token for token in tokens if token is not None],
        merges=_merges(path, model.get("merges")),
        special_tokens=special,
        pre_tokenizer=_pre_tokenizer(path, content.get("pre_tokenizer")),
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys(ends)),
        add_bos=_adds_bos(path, content.get("post_processor"), settings, bos_id, token_id_of),
        chat_template=_chat_template(folder, settings),
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_object(path) if os.path.lexists(path) else {}  # a link to nowhere is not the same as no file


def _check_model(path: Path, content: dict[str, Any], model: dict[str, Any]) -> None:
    if model.get("type", "BPE") != "BPE":
        raise UnsupportedModelError(f"{path}: tokenizer model {shown(model['type'])} is not supported; supported: BPE")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise UnsupportedModelError(f"{path}: BPE with {key} is not supported; supported: byte-level BPE")
    if content.get("normalizer") is not None:
        raise UnsupportedModelError(f"{path}: the text normalizer {_kind(content['normalizer'])} is not supported")


def _kind(part: Any, depth: int = 0) -> str:
    """The type of a tokenizer part, with those of its steps: what a message can say about it."""
    if not isinstance(part, dict) or depth > 2:
        return shown(part)
    steps = part.get("pretokenizers") or part.get("normalizers")
    if isinstance(steps, list):
        return " + ".join(_kind(step, depth + 1) for step in steps[:8])
    kind, pattern = part.get("type"), part.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    name = kind if isinstance(kind, str) and kind.isidentifier() else shown(kind)
    return f"{name:.80} {regex!r:.300}" if isinstance(regex, str) else f"{name:.80}"


def _pre_tokenizer(path: Path, part: Any) -> str:
    """Which of the known pre-tokenizers this is."""
    steps = part.get("pretokenizers") if isinstance(part, dict) and part.get("type") == "Sequence" else [part]
    if isinstance(steps, list):
        # trim_offsets is about positions in the text, not about where it is cut
        cleaned = [
            {key: value for key, value in step.items() if key != "trim_offsets"} if isinstance(step, dict) else step
            for step in steps
        ]
        for step in cleaned:
            if isinstance(step, dict) and step.get("type") == "ByteLevel":
                step.setdefault("use_regex", True)  # older files leave it out
        for name, known in _PRE_TOKENIZERS.items():
            if cleaned == known:
                return name
    raise UnsupportedModelError(
        f"{path}: the pre-tokenizer {_kind(part)} is not supported; supported: {', '.join(_PRE_TOKENIZERS)}"
    )


def _added_tokens(path: Path, content: dict[str, Any]) -> dict[str, int]:
    """name -> id of the tokens that the file adds to the BPE vocabulary; control tokens, all of them, to us."""
    special: dict[str, int] = {}
    for entry in typed(content.get("added_tokens") or [], list, path, "added_tokens"):
        entry = typed(entry, dict, path, "added_tokens")
        name = typed(entry.get("content"), str, path, "added_tokens.content")
        token_id = typed(entry.get("id"), int, path, f"the id of {shown(name)}")
        if not name or special.get(name, token_id) != token_id:
            raise ModelFileError(f"{path}: the added token {shown(name)} is empty or has two ids")
        special[name] = token_id
    return special


def _place(path: Path, tokens: list[bytes | None], token_id: object, spelling: str) -> None:
    """Check that this id can be this token's."""
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise ModelFileError(
            f"{path}: the token {shown(spelling)} has the id {shown(token_id)}; "
            f"the config's vocab_size allows 0 to {len(tokens) - 1}"
        )
    if tokens[token_id] is not None:
        raise ModelFileError(f"{path}: the id {token_id} belongs to {shown(spelling)} and to another token")


def _utf8(path: Path, name: str) -> bytes:
    try:
        return name.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, written as an escape
        raise ModelFileError(f"{path}: the added token {shown(name)} is not text") from None


def _merges(path: Path, merges: Any) -> list[tuple[bytes, bytes]]:
    """Merges as files write them: "a b", or since 2024 ["a", "b"]."""
    pairs = []
    for index, merge in enumerate(typed(merges, list, path, "model.merges")):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise ModelFileError(f"{path}: merge {index} is {shown(merge)}, not two tokens")
        pairs.append((token_bytes(path, pair[0]), token_bytes(path, pair[1])))
    return pairs


def _ids(path: Path, value: Any, vocab_size: int) -> list[int]:
    """One id, a list of them, or nothing, as a list."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise ModelFileError(f"{path}: the token id {shown(token_id)} is not one of 0 to {vocab_size - 1}")
    return list(ids)


def _adds_bos(path: Path, processor: Any, settings: dict[str, Any], bos_id: int | None, token_id_of: Any) -> bool:
    """Whether a token goes before every prompt: what the post-processor does, else what the settings say."""
    parts = [processor]
    if isinstance(processor, dict) and processor.get("type") == "Sequence":
        parts = typed(processor.get("processors"), list, path, "post_processor.processors")
    for part in parts:
        if isinstance(part, dict) and part.get("type") == "TemplateProcessing":
            single = part.get("single")
            steps = [step for step in single if isinstance(step, dict)] if isinstance(single, list) else []
            tokens = [step.get("SpecialToken") for step in steps]  # None for the text itself
            if any(token is not None for token in tokens[1:]):
                raise UnsupportedModelError(f"{path}: it puts special tokens after a prompt, not only BOS before it")
            if not tokens or tokens[0] is None:
                return False
            token = tokens[0].get("id") if isinstance(tokens[0], dict) else None
            if bos_id is None or token_id_of(token) != bos_id:
                raise UnsupportedModelError(f"{path}: it puts {shown(token)} before a prompt, not the BOS token")
            return True
    value = settings.get("add_bos_token")
    return bos_id is not None and value is True


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja if there is one, else the template in tokenizer_config.json called default."""
    file = folder / "chat_template.jinja"
    if os.path.lexists(file):
        return read_text(file)
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    if template is not None and not isinstance(template, str):
        raise ModelFileError(f"{folder / 'tokenizer_config.json'}: chat_template must be text, not {shown(template)}")
    return template
