"""AsyncLLMEngine: an async iterator a request, over an LLMEngine whose steps run in a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator
from types import TracebackType

from minserve.engine.llm_engine import LLMEngine
from minserve.errors import EngineDeadError, ParameterError, in_words, shown
from minserve.request import Request, RequestOutput


class AsyncLLMEngine:
    """Serves coroutines from an engine that nobody else steps.

    ::

        async with AsyncLLMEngine(llm.new_engine()) as engine:
            async for output in engine.generate(request):
                print(output.outputs[0].text)

    The thread starts with the first request and sleeps while there is nothing to do. One AsyncLLMEngine may serve
    several event loops. `close` aborts what is unfinished.
    """

    def __init__(self, engine: LLMEngine) -> None:
        if not isinstance(engine, LLMEngine):
            raise ParameterError(f"AsyncLLMEngine serves an LLMEngine, such as llm.new_engine(), not {shown(engine)}")
        self.engine = engine
        self._process = os.getpid()
        self._streams: dict[str, _Stream] = {}
        # Before its next step, the thread adds requests, and aborts those whose consumers have left.
        self._inbox: deque[tuple[Request, _Stream] | str] = deque()
        self._served: dict[str, _Stream] = {}  # the thread's own: whose requests are in the engine
        self._changed = threading.Condition()  # guards all of these; told when there may be work
        self._closed = False
        self._error: BaseException | None = None  # what the thread died of
        self._thread: threading.Thread | None = None

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Yield what there is of the answer whenever more has come; the last one has finished == True.

        Each is a copy that does not change any more. A consumer that is slower than the engine misses intermediate
        states, never tokens: each state holds all tokens so far. When the consumer stops iterating, is cancelled, or
        closes the generator, the request is aborted and its blocks are free before the next step.
        Raises as LLMEngine.check does before anything is yielded, ParameterError for a request id that is in use, and
        EngineDeadError if the engine was closed or has failed.
        """
        if not isinstance(request, Request):
            raise ParameterError(f"generate takes a Request, not {shown(request)}")
        self.engine.check(request)
        if request.arrival_time is None:
            request = dataclasses.replace(request, arrival_time=self.engine.clock())
        stream = _Stream(asyncio.get_running_loop())
        self._enter(request, stream)
        try:
            while not stream.ended:
                yield await stream.next()
        finally:
            self._leave(request.request_id, stream)

    def _enter(self, request: Request, stream: _Stream) -> None:
        with self._changed:
            if self._closed:
                raise self._dead()
            if self._process != os.getpid():
                raise EngineDeadError("the engine's thread stayed behind in the process that forked this one")
            for request_id in [name for name, other in self._streams.items() if other.abandoned]:
                del self._streams[request_id]  # its answer was there, and its event loop was closed before it was read
            if request.request_id in self._streams:
                raise ParameterError(f"request id {request.request_id!r} is in use; each request needs its own")
            self._streams[request.request_id] = stream
            self._inbox.append((request, stream))
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="minserve-engine", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _leave(self, request_id: str, stream: _Stream) -> None:
        with self._changed:
            if self._streams.get(request_id) is not stream:  # its event loop was closed, and it was let go of
                return
            del self._streams[request_id]
            if not stream.ended:
                self._inbox.append(request_id)
                self._changed.notify()

    def _dead(self) -> EngineDeadError:
        error = EngineDeadError(
            f"the engine has stopped: {'it was closed' if self._error is None else in_words(self._error)}"
        )
        error.__cause__ = self._error
        return error

    def _loop(self) -> None:
        """The thread: take in who has come, let go of who has left, step, hand out what the step brought."""
        try:
            while self._take_in():
                for output in self.engine.step():
                    self._publish(output)
        except BaseException as error:  # a fault of the engine itself: nobody must wait for it any longer
            self._error = error
        finally:
            self._stop()

    def _take_in(self) -> bool:
        """Wait until there is work; false once this is closed."""
        with self._changed:
            while not (self._inbox or self.engine.has_unfinished or self._closed):
                self._changed.wait()
            inbox = list(self._inbox)
            self._inbox.clear()
        for item in inbox:
            if isinstance(item, str):
                self._served.pop(item, None)
                self.engine.abort(item)
                continue
            request, stream = item
            try:
                self.engine.add_request(request)
                self._served[request.request_id] = stream
            except Exception as error:  # no memory left for it, say
                stream.put(error)
        return not self._closed

    def _publish(self, output: RequestOutput) -> None:
        """Tell the consumer of this very request: the next one of its id may wait already, if its own has left."""
        request_id = output.request_id
        stream = self._served.get(request_id)
        if stream is None:
            return
        if output.finished:
            del self._served[request_id]
        if not stream.put(_snapshot(output)):  # nobody is there, and nobody will leave
            with self._changed:
                self._streams.pop(request_id, None)
            self._served.pop(request_id, None)
            self.engine.abort(request_id)

    def _stop(self) -> None:
        """Nobody is served any more: free what is unfinished, and tell its consumers."""
        with self._changed:
            self._closed = True
            streams = dict(self._streams)
        for request_id, stream in streams.items():
            with contextlib.suppress(Exception):  # the engine may be what has failed
                self.engine.abort(request_id)
            stream.put(self._dead())

    def close(self) -> None:
        """Stop the thread; requests that have not ended are aborted and their consumers get EngineDeadError."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    async def __aenter__(self) -> AsyncLLMEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)


class _Stream:
    """From the engine's thread to one coroutine: the latest news, and a bell."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._bell = asyncio.Event()
        self._latest: deque[RequestOutput | Exception] = deque(maxlen=1)  # a newer one takes its place
        self._last = False  # is there nothing to come after the latest?
        self.ended = False  # has the consumer seen the last?

    def put(self, news: RequestOutput | Exception) -> bool:
        """Called in the engine's thread. What comes after the last is dropped. False: the event loop is closed."""
        if self._last:
            return True
        self._last = isinstance(news, Exception) or news.finished
        self._latest.append(news)
        try:
            self._loop.call_soon_threadsafe(self._bell.set)
        except RuntimeError:
            return False
        return True

    @property
    def abandoned(self) -> bool:
        """Will nobody ever read it? (What is not finished, the engine's thread finds out when it puts more.)"""
        return self._last and self._loop.is_closed()

    async def next(self) -> RequestOutput:
        """Called in the coroutine: the latest state, once there is one that it has not seen. Raises what was put."""
        while not self._latest:
            await self._bell.wait()
            self._bell.clear()
        news = self._latest.popleft()
        self.ended = isinstance(news, Exception) or news.finished
        if isinstance(news, Exception):
            raise news
        return news


def _snapshot(output: RequestOutput) -> RequestOutput:
    """A copy that later steps do not change."""
    return dataclasses.replace(
        output,
        outputs=[
            dataclasses.replace(
                answer,
                token_ids=list(answer.token_ids),
                logprobs=None if answer.logprobs is None else list(answer.logprobs),
            )
            for answer in output.outputs
        ],
        metrics=dataclasses.replace(output.metrics),
        prompt_logprobs=None if output.prompt_logprobs is None else list(output.prompt_logprobs),
    )
