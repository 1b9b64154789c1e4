"""SpeculativeConfig: who drafts, and how much, under vLLM's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minserve.errors import ParameterError, check_whole_number, did_you_mean, shown

METHODS = ("draft_model", "ngram")
_MOST_TOKENS = 64


@dataclass(frozen=True)
class SpeculativeConfig:
    """Raises ParameterError, naming the option, for a value out of range.

    method: "draft_model", a smaller model of the same vocabulary guesses; "ngram", what followed the last tokens when
        they stood in the prompt or the answer before. None: draft_model if a model is given.
    model: the draft model's name or path.
    num_speculative_tokens: guesses a sequence and step, 1 to 64.
    prompt_lookup_max, prompt_lookup_min: for ngram, how many last tokens are looked up, the longest first. A minimum of
        0 stands for 2, or for prompt_lookup_max where that is less.
    adaptive: go without drafts while measurement says that they do not pay; see pace.Pace.
    """

    method: str | None = None
    model: str | Path | None = None
    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 0
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.method is None and self.model is not None:
            object.__setattr__(self, "method", "draft_model")
        if self.method not in METHODS:
            near = did_you_mean(self.method, METHODS) if isinstance(self.method, str) else ""
            raise ParameterError(
                f"speculative_config: method must be one of {', '.join(METHODS)}, not {shown(self.method)}{near}"
            )
        if self.method == "draft_model" and not isinstance(self.model, (str, Path)):
            raise ParameterError(
                f"speculative_config: draft_model needs a model, a name or path, not {shown(self.model)}"
            )
        if self.method == "ngram" and self.model is not None:
            raise ParameterError("speculative_config: ngram takes no model; leave it out, or use method draft_model")
        check_whole_number("speculative_config: num_speculative_tokens", self.num_speculative_tokens, 1, _MOST_TOKENS)
        check_whole_number("speculative_config: prompt_lookup_max", self.prompt_lookup_max, 1, _MOST_TOKENS)
        check_whole_number("speculative_config: prompt_lookup_min", self.prompt_lookup_min, 0, self.prompt_lookup_max)
        if self.prompt_lookup_min == 0:
            object.__setattr__(self, "prompt_lookup_min", min(2, self.prompt_lookup_max))
        if not isinstance(self.adaptive, bool):
            raise ParameterError(f"speculative_config: adaptive must be True or False, not {shown(self.adaptive)}")

    @classmethod
    def of(cls, options: SpeculativeConfig | Mapping[str, Any]) -> SpeculativeConfig:
        """From a mapping of options, as LLM takes it. Raises ParameterError."""
        if isinstance(options, SpeculativeConfig):
            return options
        if not isinstance(options, Mapping):
            raise ParameterError(
                f'speculative_config must be a dict such as {{"method": "ngram"}}, not {shown(options)}'
            )
        names = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in names:
                raise ParameterError(
                    f"speculative_config has no option {shown(name)}{did_you_mean(str(name), names)}; "
                    f"there are {', '.join(names)}"
                )
        return cls(**options)
