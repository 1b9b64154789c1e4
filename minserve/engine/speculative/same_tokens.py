"""check_same_tokens: a guess is a number, and must mean the same text to whoever guesses and whoever verifies."""

from __future__ import annotations

from minserve.errors import ParameterError
from minserve.text.vocabulary import Vocabulary


def check_same_tokens(target: Vocabulary, draft: Vocabulary, name: str) -> None:
    """Raise ParameterError, with the first difference, unless an id means the same text in both.

    One of the two may have more ids at its end if all of those are control tokens: rows that pad an embedding to a
    round number. The draft model never proposes an id that the target does not have, and guesses nothing behind one
    that it does not have itself.
    """

    def refuse(what: str) -> ParameterError:
        return ParameterError(
            f"the draft model {name} cannot guess for this model, its vocabulary is another: {what}; "
            "give a draft model of the same tokenizer, or --draft ngram (method ngram)"
        )

    for token_id, (own, other) in enumerate(zip(target.tokens, draft.tokens, strict=False)):
        if own != other:
            raise refuse(f"token {token_id} is {own!r} in the model and {other!r} in the draft model")
    both = min(len(target.tokens), len(draft.tokens))
    for which, vocabulary in (("the model", target), ("the draft model", draft)):
        control = set(vocabulary.special_tokens.values())
        for token_id in range(both, len(vocabulary.tokens)):
            if token_id not in control:
                raise refuse(f"token {token_id}, {vocabulary.tokens[token_id]!r}, is only in {which}")
    shared = [
        {name: token_id for name, token_id in vocabulary.special_tokens.items() if token_id < both}
        for vocabulary in (target, draft)
    ]
    if differing := shared[0].items() ^ shared[1].items():
        token_id = min(token_id for _, token_id in differing)
        raise refuse(f"token {token_id} is not the same control token in both")
    if (target.pre_tokenizer, list(target.merges)) != (draft.pre_tokenizer, list(draft.merges)):
        raise refuse("text is cut into tokens by other rules")
