"""AsyncLLMEngine: many coroutines, one engine thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable

import pytest

from minserve.engine.async_llm_engine import AsyncLLMEngine
from minserve.engine.llm_engine import LLMEngine
from minserve.errors import EngineDeadError, ParameterError
from minserve.request import Request, RequestOutput

from .support.scripted_model import EOS, check_blocks, engine, request, saying, serve

ENDLESS = {"ignore_eos": True, "max_tokens": None}


def served(test: Callable[[AsyncLLMEngine], Awaitable[None]], eng: LLMEngine, seconds: float = 30) -> None:
    """Run the test on an AsyncLLMEngine; afterwards no block is in use and no thread is left."""

    async def main() -> None:
        async with AsyncLLMEngine(eng) as async_engine:
            await asyncio.wait_for(test(async_engine), seconds)

    before = threading.active_count()
    asyncio.run(main())
    assert not eng.has_unfinished
    assert eng.blocks.pool.num_used == 0
    check_blocks(eng)
    assert threading.active_count() == before


async def last(async_engine: AsyncLLMEngine, item: Request) -> RequestOutput:
    return [state async for state in async_engine.generate(item)][-1]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_many_requests_at_once_each_get_their_own_answer() -> None:
    def script(name: str, output: list[int]) -> object:
        said = [*name.encode(), EOS]
        return said[min(len(output), len(said) - 1)]

    async def test(async_engine: AsyncLLMEngine) -> None:
        names = [f"request {i}" for i in range(40)]
        outputs = await asyncio.gather(*(last(async_engine, request("hi", name)) for name in names))
        assert [o.outputs[0].text for o in outputs] == names
        assert all(o.finished for o in outputs)

    served(test, engine(script))


def test_states_only_grow_and_do_not_change_any_more() -> None:
    async def test(async_engine: AsyncLLMEngine) -> None:
        states = [state async for state in async_engine.generate(request("hi", max_tokens=50, ignore_eos=True))]
        lengths = [len(state.outputs[0].token_ids) for state in states]
        assert lengths == sorted(set(lengths))
        assert lengths[-1] == 50
        assert [state.finished for state in states] == [False] * (len(states) - 1) + [True]

    served(test, engine(saying("hello")))


def leave_by_break(async_engine: AsyncLLMEngine) -> Awaitable[None]:
    async def leave() -> None:
        async with contextlib.aclosing(async_engine.generate(request("hi", "gone", **ENDLESS))) as states:
            async for state in states:
                if state.outputs[0].token_ids:
                    break

    return leave()


def leave_by_cancel(async_engine: AsyncLLMEngine) -> Awaitable[None]:
    async def leave() -> None:
        task = asyncio.create_task(last(async_engine, request("hi", "gone", **ENDLESS)))
        await until(lambda: async_engine.engine.has_unfinished)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    return leave()


def leave_before_the_first_step(async_engine: AsyncLLMEngine) -> Awaitable[None]:
    async def leave() -> None:
        task = asyncio.create_task(last(async_engine, request("hi", "gone", **ENDLESS)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    return leave()


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_cancel, leave_before_the_first_step])
def test_when_the_consumer_goes_away_its_request_ends(leave: Callable[[AsyncLLMEngine], Awaitable[None]]) -> None:
    """Elsewhere a zombie went on to decode to max_tokens, held its blocks and slowed the others."""
    eng = engine(saying("hello"), max_model_len=100_000, blocks=25_000)

    async def test(async_engine: AsyncLLMEngine) -> None:
        await leave(async_engine)
        await until(lambda: not eng.has_unfinished)
        assert eng.blocks.pool.num_used == 0
        again = await last(async_engine, request("hi", "gone"))  # and its id is free again
        assert again.outputs[0].text == "hello"

    served(test, eng)


def test_what_can_never_be_served_is_refused_before_anything_is_yielded() -> None:
    async def test(async_engine: AsyncLLMEngine) -> None:
        with pytest.raises(ParameterError, match="empty"):
            await last(async_engine, request(""))
        with pytest.raises(ParameterError, match="limit is 256"):
            await last(async_engine, request("x" * 256))
        assert (await last(async_engine, request("hi"))).outputs[0].text == "hello"

    served(test, engine(saying("hello")))


def test_an_id_in_use_is_refused_and_the_first_one_goes_on() -> None:
    async def test(async_engine: AsyncLLMEngine) -> None:
        first = asyncio.create_task(last(async_engine, request("hi", "same")))
        await asyncio.sleep(0)
        with pytest.raises(ParameterError, match="in use"):
            await last(async_engine, request("ho", "same"))
        assert (await first).outputs[0].text == "hello"

    served(test, engine(saying("hello")))


def test_a_request_that_fails_fails_alone() -> None:
    def script(name: str, output: list[int]) -> object:
        return RuntimeError("no such kernel") if name == "bad" and len(output) == 2 else saying("fine")(name, output)

    async def test(async_engine: AsyncLLMEngine) -> None:
        names = ["a", "bad", "b"]
        outputs = await asyncio.gather(*(last(async_engine, request("hi", name)) for name in names))
        assert [o.outputs[0].finish_reason for o in outputs] == ["stop", "error", "stop"]
        assert "no such kernel" in str(outputs[1].outputs[0].error)

    served(test, engine(script))


def test_what_is_no_request_and_what_is_no_engine_is_told_so() -> None:
    async def test(async_engine: AsyncLLMEngine) -> None:
        with pytest.raises(ParameterError, match="takes a Request"):
            await last(async_engine, "hello")  # type: ignore[arg-type]

    served(test, engine(saying("hello")))
    with pytest.raises(ParameterError, match=r"llm.new_engine\(\)"):
        AsyncLLMEngine(object())  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads: it is what is tested
def test_a_forked_child_is_told_that_its_engine_has_no_thread() -> None:
    """Elsewhere it waited for ever: threads do not come along into a child."""

    async def test(async_engine: AsyncLLMEngine) -> None:
        await last(async_engine, request("hi"))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                async_engine._enter(request("hi"), None)  # type: ignore[arg-type]
            except EngineDeadError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    served(test, engine(saying("hello")))


def test_when_the_engine_itself_fails_nobody_waits_for_ever() -> None:
    eng = engine(saying("hello"))

    def broken(*_: object) -> None:
        raise RuntimeError("a bug in the scheduler")

    async def test(async_engine: AsyncLLMEngine) -> None:
        eng.scheduler.schedule = broken  # type: ignore[method-assign,assignment]
        for _ in range(2):  # those who wait, and those who come later
            with pytest.raises(EngineDeadError, match="a bug in the scheduler"):
                await last(async_engine, request("hi"))

    served(test, eng)


def test_closing_tells_those_who_wait() -> None:
    eng = engine(saying("hello"), max_model_len=100_000, blocks=25_000)

    async def test(async_engine: AsyncLLMEngine) -> None:
        task = asyncio.create_task(last(async_engine, request("hi", **ENDLESS)))
        await until(lambda: eng.has_unfinished)
        await asyncio.to_thread(async_engine.close)
        with pytest.raises(EngineDeadError, match="closed"):
            await task
        with pytest.raises(EngineDeadError, match="closed"):
            await last(async_engine, request("hi"))

    served(test, eng)
    assert serve(eng, request("hi"))[0].outputs[0].text == "hello"  # the engine under it is as good as new


def test_several_event_loops_share_one_engine() -> None:
    eng = engine(saying("hello"))
    async_engine = AsyncLLMEngine(eng)
    texts: list[str] = []

    def client(name: int) -> None:
        for i in range(20):
            texts.append(asyncio.run(last(async_engine, request("hi", f"{name}-{i}"))).outputs[0].text)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    async_engine.close()
    assert texts == ["hello"] * 60
    assert eng.blocks.pool.num_used == 0
