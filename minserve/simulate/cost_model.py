"""CostModel: the seconds that one engine step takes, from what is in its batch."""

from __future__ import annotations

import dataclasses
import itertools
import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minserve.errors import ParameterError, shown

FORMAT = "minserve cost model 1"
_LARGEST_FILE = 2**20  # bytes
_MOST_KNOTS = 1000
_RATES = ("key_seconds", "pair_seconds", "sequence_seconds", "row_seconds")


@dataclass(frozen=True)
class StepWork:
    """What one step has to compute.

    tokens: of all sequences. keys: that attention reads, each once a sequence: t tokens behind c computed ones read
    c + t. pairs: of a query and a key that it sees; the same t tokens make t * c + t * (t + 1) / 2. sequences: in the
    batch. rows: of logits, each one then sampled.
    """

    tokens: float
    keys: float
    pairs: float
    sequences: float
    rows: float

    @classmethod
    def of(cls, batch: Iterable[Any]) -> StepWork:
        """The work of a batch of ScheduledSequence, before it is run."""
        tokens = keys = pairs = sequences = rows = 0
        for item in batch:
            count, computed = item.num_tokens, item.seq.num_computed_tokens
            tokens += count
            rows += item.num_logits
            sequences += 1
            keys += computed + count
            pairs += count * computed + count * (count + 1) // 2
        return cls(tokens, keys, pairs, sequences, rows)


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step: a curve over the batch's tokens, and a rate for each thing that adds to it.

    token_counts, token_seconds: a step of token_counts[i] tokens takes token_seconds[i], with straight lines
        between and the last one going on behind. It is the weights' part: read once from memory whatever the
        batch is, then bound by arithmetic, so neither a constant nor a line (the roofline model, Williams et
        al., CACM 2009). token_counts starts at 1; neither list falls.
    key_seconds: a key (and its value) that attention reads. pair_seconds: a query-key pair, its arithmetic. A decode
        makes one pair of each key that it reads; the tokens of a prompt share what is read.
    sequence_seconds: a sequence: its scheduling, its block table, its bookkeeping.
    row_seconds: a row of logits: the output layer, and its sampling.
    source: what was measured: model, backend, threads, machine, ...; the simulation takes vocab_size,
        max_position_embeddings and kv_bytes_per_token from it, if they are there.

    The engine's own time is in it, as a clock around the whole step measures it. Raises ParameterError for
    numbers that make no cost model.
    """

    token_counts: tuple[int, ...]
    token_seconds: tuple[float, ...]
    key_seconds: float
    pair_seconds: float
    sequence_seconds: float
    row_seconds: float
    source: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts, seconds = self.token_counts, self.token_seconds
        if not 2 <= len(counts) == len(seconds) <= _MOST_KNOTS:
            raise ParameterError(
                f"token_counts and token_seconds must be two lists of one length, 2 to {_MOST_KNOTS}, "
                f"not {len(counts)} and {len(seconds)}"
            )
        if not all(type(count) is int and 0 < count < 2**31 for count in counts) or counts[0] != 1:
            raise ParameterError(f"token_counts must be whole numbers that start at 1, not {shown(list(counts))}")
        if any(left >= right for left, right in itertools.pairwise(counts)):
            raise ParameterError(f"token_counts must rise, not {shown(list(counts))}")
        for each in seconds:
            _check_seconds("a value of token_seconds", each)
        if any(left > right for left, right in itertools.pairwise(seconds)) or seconds[0] <= 0:
            raise ParameterError(f"token_seconds must start above 0 and never fall, not {shown(list(seconds))}")
        for name in _RATES:
            _check_seconds(name, getattr(self, name))

    def seconds_of_tokens(self, tokens: float) -> float:
        """The curve at that many tokens."""
        counts, seconds = self.token_counts, self.token_seconds
        right = min(max(bisect_right(counts, tokens), 1), len(counts) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (counts[right] - counts[left])
        return seconds[left] + slope * (tokens - counts[left])

    def seconds(self, work: StepWork) -> float:
        """What a step with that work takes."""
        return (
            self.seconds_of_tokens(work.tokens)
            + work.keys * self.key_seconds
            + work.pairs * self.pair_seconds
            + work.sequences * self.sequence_seconds
            + work.rows * self.row_seconds
        )

    def scaled(self, factor: float) -> CostModel:
        """A machine that takes `factor` times as long for everything."""
        return dataclasses.replace(
            self,
            token_seconds=tuple(each * factor for each in self.token_seconds),
            **{name: getattr(self, name) * factor for name in _RATES},
        )

    def save(self, path: str | Path) -> None:
        """Write it as a JSON file that `load` reads. Raises OSError."""
        document = {"format": FORMAT, **dataclasses.asdict(self)}
        Path(path).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read a file that `save` wrote. Raises ParameterError naming the file and what is wrong in it, OSError."""
        document = _read_object(Path(path))
        names = [each.name for each in dataclasses.fields(cls)]
        if document.pop("format", None) != FORMAT:
            raise ParameterError(
                f"{path} is not a cost model: its format is not {FORMAT!r}; `minserve bench --calibrate FILE` makes one"
            )
        if missing := [name for name in names if name not in document]:
            raise ParameterError(f"{path}: {missing[0]} is missing")
        if unknown := [name for name in document if name not in names]:
            raise ParameterError(f"{path}: there is no {shown(unknown[0])} in a cost model")
        for name in ("token_counts", "token_seconds"):
            if not isinstance(document[name], list):
                raise ParameterError(f"{path}: {name} must be a list, not {shown(document[name])}")
            document[name] = tuple(document[name])
        if not isinstance(document["source"], dict):
            raise ParameterError(f"{path}: source must be an object, not {shown(document['source'])}")
        try:
            return cls(**document)
        except ParameterError as error:
            raise ParameterError(f"{path}: {error}") from None


def default_cost_model() -> CostModel:
    """SmolLM2-135M-Instruct (Q4_1) on the C core, as its own `source` says where; it comes with the package."""
    return CostModel.load(Path(__file__).with_name("smollm2_c.json"))


def _check_seconds(name: str, value: object) -> None:
    """Raise ParameterError unless value is a number from 0 to a million."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and isinstance(value, (int, float)) and 0 <= value <= 1e6):  # NaN fails both comparisons
        raise ParameterError(f"{name} must be a number of seconds from 0 to 1e6, not {shown(value)}")


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file. Raises ParameterError, OSError."""
    with path.open("rb") as file:  # and not by its size: it may be one without an end, such as /dev/zero
        data = file.read(_LARGEST_FILE + 1)
    if len(data) > _LARGEST_FILE:
        raise ParameterError(f"{path} is larger than {_LARGEST_FILE} bytes, so it is not a cost model")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or absurdly nested
        raise ParameterError(f"{path} is not a cost model: it is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise ParameterError(f"{path} is not a cost model: it holds {shown(document)}")
    return document
