"""EngineConfig: how much the engine may do at once, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

from minserve.engine.scheduling_policy import SchedulingPolicy, scheduling_policy
from minserve.errors import ParameterError, check_whole_number, shown

# Bytes of KV blocks unless the user chooses; the system gives memory only as blocks are first written.
DEFAULT_KV_CACHE_MEMORY = 512 * 2**20


def blocks_in(nbytes: int | None, block_bytes: int, *, max_model_len: int, block_size: int, max_num_seqs: int) -> int:
    """How many KV blocks of block_bytes each there is room for in so many bytes. Raises ParameterError if for none.

    None: in DEFAULT_KV_CACHE_MEMORY, but for one sequence of max_model_len at least, and for no more than
    max_num_seqs of them.
    """
    if nbytes is not None:
        check_whole_number("kv_cache_memory", nbytes, 1)
        if nbytes < block_bytes:
            least = f"{block_bytes}, the bytes of one KV block"
            raise ParameterError(f"kv_cache_memory must be a whole number of at least {least}, not {nbytes}")
        return nbytes // block_bytes
    check_whole_number("max_num_seqs", max_num_seqs, 1)
    longest = -(-max_model_len // block_size)
    return max(longest, min(DEFAULT_KV_CACHE_MEMORY // block_bytes, longest * max_num_seqs))


@dataclass(frozen=True)
class EngineConfig:
    """Raises ParameterError, naming the option, for a value out of range.

    max_model_len: most tokens of a sequence, prompt and answer together; a smaller pool lowers it.
    num_kv_blocks, block_size: the KV memory, and tokens in a block.
    max_num_seqs: most sequences that run at the same time (a request of n answers is up to n sequences).
    max_num_batched_tokens: most tokens in a step.
    enable_prefix_caching: let a sequence start from blocks that another one computed.
    enable_chunked_prefill: spread a long prompt over several steps; false computes every prompt whole, in one step,
        and raises max_num_batched_tokens to max_model_len for it.
    scheduling_policy: "fcfs", "priority", or an object with key(seq).
    static_batching: a baseline to measure against: request-level batching. A batch is admitted only when the last one
        has ended, and each sequence reserves blocks for its prompt and max_tokens.
    num_speculative_tokens: most guessed tokens that a decode verifies in a step, 0 without speculation. Each running
        sequence must be able to, so it lowers max_num_seqs to what max_num_batched_tokens has room for.
    reserve_max_model_len: a baseline to measure against: no paging. Each sequence reserves blocks for max_model_len
        when it is admitted, as where a cache is one piece of memory (arXiv 2309.06180, section 3.1).
    """

    max_model_len: int
    num_kv_blocks: int
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: str | SchedulingPolicy = "fcfs"
    num_speculative_tokens: int = 0
    static_batching: bool = False
    reserve_max_model_len: bool = False

    def __post_init__(self) -> None:
        for name in ("max_model_len", "num_kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            check_whole_number(name, getattr(self, name), 1)
        check_whole_number("num_speculative_tokens", self.num_speculative_tokens, 0)
        switches = ("enable_prefix_caching", "enable_chunked_prefill", "static_batching", "reserve_max_model_len")
        for name in switches:
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(f"{name} must be True or False, not {shown(getattr(self, name))}")
        scheduling_policy(self.scheduling_policy)
        if self.num_speculative_tokens:
            self._check_speculation()

    def _check_speculation(self) -> None:
        if self.static_batching or self.reserve_max_model_len:
            raise ParameterError("static_batching and reserve_max_model_len are baselines without speculation")
        if self.num_speculative_tokens >= self.token_budget:
            raise ParameterError(
                f"max_num_batched_tokens must be at least {self.num_speculative_tokens + 1}, a token and the "
                f"num_speculative_tokens behind it, not {self.max_num_batched_tokens}"
            )

    @property
    def longest_sequence(self) -> int:
        """max_model_len, or what the whole pool holds if that is less."""
        return min(self.max_model_len, self.num_kv_blocks * self.block_size)

    @property
    def token_budget(self) -> int:
        """max_num_batched_tokens, or enough for the longest prompt if prompts are not cut into chunks."""
        if self.enable_chunked_prefill:
            return self.max_num_batched_tokens
        return max(self.max_num_batched_tokens, self.longest_sequence)

    @property
    def seats(self) -> int:
        """Most sequences that may run: each must get a token, and its guesses, in every step."""
        return min(self.max_num_seqs, self.token_budget // (1 + self.num_speculative_tokens))

    def reserved_tokens(self, longest: int) -> int:
        """Tokens that a sequence gets blocks for when it is admitted, whatever it needs then; longest: its own most."""
        if self.reserve_max_model_len:
            return self.longest_sequence
        return longest if self.static_batching else 0
