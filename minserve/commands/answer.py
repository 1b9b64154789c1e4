"""One answer on the screen: printed while it grows, stopped by Ctrl-C, summed up in a line."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from minserve.commands.output import write_text
from minserve.commands.progress import StageProgress
from minserve.request import CompletionOutput, RequestMetrics, RequestOutput


class AnswerPrinter:
    """Writes answers to stdout while they grow: each in full before the next, with headers if there are several."""

    def __init__(self, n: int = 1) -> None:
        self._n = n
        self._index = 0  # of the answer that is being written
        self._written = 0  # characters of it
        self._line_open = False

    def show(self, output: RequestOutput) -> None:
        """Write what is new in the output. Its texts only ever grow."""
        while self._index < len(output.outputs):
            answer = output.outputs[self._index]
            self._write(answer)
            if not answer.finished:
                return
            self.end()
            self._index, self._written = self._index + 1, 0

    def _write(self, answer: CompletionOutput) -> None:
        piece = answer.text[self._written :]
        if self._n > 1 and self._written == 0 and (piece or answer.finished):
            write_text(f"[{answer.index + 1}] ")
            self._line_open = True
        if piece:
            write_text(piece)
            self._written += len(piece)
            self._line_open = not piece.endswith("\n")

    def end(self) -> None:
        """End the line that is being written, if one is."""
        if self._line_open:
            write_text("\n")
            self._line_open = False


def follow(
    stream: Iterator[RequestOutput], show: Callable[[RequestOutput], None], *, quiet: bool = False
) -> tuple[RequestOutput, bool]:
    """Show a stream's output as it grows, until its end or Ctrl-C; (the last output, was it interrupted?).

    While a prompt of several steps is prefilled, a terminal shows how far it is, unless quiet. An interrupted
    request is ended and its blocks are free. Raises KeyboardInterrupt if Ctrl-C came before there was anything
    to show.
    """
    output: RequestOutput | None = None
    interrupted = False
    try:
        with interruptible() as interrupt, _PrefillBar(quiet) as bar:
            for output in stream:
                bar.update(output)
                show(output)
                if interrupt.requested and not output.finished:
                    interrupted = True
                    break
    except KeyboardInterrupt:  # a second Ctrl-C, while the model computed
        interrupted = True
    finally:
        close = getattr(stream, "close", None)
        if close is not None:
            close()
    if output is None:
        raise KeyboardInterrupt
    return output, interrupted


class _PrefillBar(ExitStack):
    """A progress bar from a long prompt's first step to its first token."""

    def __init__(self, quiet: bool) -> None:
        super().__init__()
        self._quiet = quiet
        self._bar: StageProgress | None = None

    def update(self, output: RequestOutput) -> None:
        metrics = output.metrics
        if metrics.first_token_time is not None or output.finished:
            self.close()
            return
        if self._bar is None:
            self._bar = self.enter_context(StageProgress("the prompt", opening="reading", quiet=self._quiet))
        self._bar("prefill", metrics.num_prefilled_tokens, metrics.num_prompt_tokens)


class Interrupt:
    """Whether Ctrl-C came; see `interruptible`."""

    def __init__(self) -> None:
        self.requested = False


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """While this is open, the first Ctrl-C only sets `requested`; a second one raises KeyboardInterrupt.

    So an answer is ended between two tokens, where nothing is half done, and what came is kept.
    Changes the handler of SIGINT and puts the old one back.
    """
    state = Interrupt()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if state.requested:
            raise KeyboardInterrupt
        state.requested = True

    before = signal.getsignal(signal.SIGINT)
    ignored = before in (signal.SIG_IGN, None)  # a background job of a shell, for one
    if ignored or threading.current_thread() is not threading.main_thread():  # no other thread may handle signals
        yield state
        return
    signal.signal(signal.SIGINT, on_signal)
    try:
        yield state
    finally:
        signal.signal(signal.SIGINT, before)


def figures(output: RequestOutput, max_tokens: int | None) -> str:
    """The line after an answer: prompt tokens, prefill speed, TTFT, decode speed, KV blocks, why it ended."""
    metrics = output.metrics
    cached = f" ({metrics.num_cached_tokens} cached)" if metrics.num_cached_tokens else ""
    parts = [f"{metrics.num_prompt_tokens} prompt tokens{cached}"]
    if (rate := metrics.prefill_tokens_per_second) is not None:
        parts.append(f"prefill {_rate(rate)} tok/s")
    if (ttft := metrics.ttft) is not None:
        parts.append(f"TTFT {ttft:.2f} s" if ttft >= 1 else f"TTFT {ttft * 1000:.0f} ms")
    parts.append(f"{metrics.num_output_tokens} tokens out")
    if (rate := metrics.decode_tokens_per_second) is not None:
        parts.append(f"decode {_rate(rate)} tok/s")
    parts.append(f"{metrics.num_kv_blocks} KV blocks")
    reasons = dict.fromkeys(answer.finish_reason or "abort" for answer in output.outputs)
    advice = cut_because(output, max_tokens)
    parts.append(f"finish: {', '.join(reasons)}" + (f" ({advice})" if advice else ""))
    return " | ".join(parts)


def cut_because(output: RequestOutput, max_tokens: int | None) -> str | None:
    """Why an answer ended too early and what to do about it, or None if none did."""
    cut = [answer for answer in output.outputs if answer.finish_reason == "length"]
    if not cut:
        return None
    if any(len(answer.token_ids) == max_tokens for answer in cut):
        return "cut at --max-tokens; raise it for more"
    return "the context is full"


def metrics_document(metrics: RequestMetrics) -> dict[str, Any]:
    """The figures of one request for --json, under the names of RequestMetrics; times in seconds."""
    names = ["num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_kv_blocks", "num_preemptions"]
    names += ["num_draft_tokens", "num_accepted_tokens", "ttft", "prefill_seconds"]
    names += ["prefill_tokens_per_second", "decode_seconds", "decode_tokens_per_second"]
    return {name: getattr(metrics, name) for name in names}


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
