"""minserve: learn LLM serving by doing it.

::

    from minserve import LLM, SamplingParams

    llm = LLM("smollm2")
    print(llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(temperature=0))[0].outputs[0].text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minserve.engine.async_llm_engine import AsyncLLMEngine
    from minserve.errors import MinserveError
    from minserve.llm import LLM
    from minserve.ops.native import info
    from minserve.request import CompletionOutput, Request, RequestOutput
    from minserve.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "MinserveError",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "info",
]

# Loaded when first asked for, so that `minserve doctor` can still say what is wrong where a library is broken.
_HOME = {
    "LLM": "minserve.llm",
    "AsyncLLMEngine": "minserve.engine.async_llm_engine",
    "CompletionOutput": "minserve.request",
    "MinserveError": "minserve.errors",
    "Request": "minserve.request",
    "RequestOutput": "minserve.request",
    "SamplingParams": "minserve.sampling_params",
    "info": "minserve.ops.native",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'minserve' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
