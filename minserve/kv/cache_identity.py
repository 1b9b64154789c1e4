"""CacheIdentity: everything but the tokens that decides what a KV block holds and who may read it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

from minserve.request import Request


@dataclass(frozen=True)
class CacheIdentity:
    """Two sequences share KV blocks only if each of these fields is equal in both.

    The first four belong to the engine, and `of` takes the others from a request. None and "" differ.
    """

    model_revision: str | None = None  # which weights: a digest of the model's files
    tokenizer: str | None = None  # which vocabulary, merges and rules: a digest
    quantization: str | None = None  # what the weights are stored and computed as
    kv_cache_dtype: str | None = None  # what keys and values are stored as
    model: str | None = None  # the name that the request asks for
    adapter: str | None = None
    template: str | None = None
    system_policy: str | None = None
    tenant: str | None = None
    cache_salt: str | None = None

    def of(self, request: Request) -> CacheIdentity:
        """This engine's identity with a request's own fields."""
        return CacheIdentity(
            model_revision=self.model_revision,
            tokenizer=self.tokenizer,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            model=request.model,
            adapter=request.adapter,
            template=request.template,
            system_policy=request.system_policy,
            tenant=request.tenant,
            cache_salt=request.cache_salt,
        )

    def digest(self) -> bytes:
        """32 bytes that stand for all fields.

        Each field is written as its name and its value, each with its length before it, so that no value can pass
        for part of another: tenant "a" with salt "bc" is not tenant "ab" with salt "c", nor an adapter named "a".
        """
        hashed = hashlib.sha256()
        for field in fields(self):
            value = getattr(self, field.name)
            for part in (field.name, value):
                data = b"" if part is None else str(part).encode("utf-8", "surrogatepass")
                length = -1 if part is None else len(data)
                hashed.update(length.to_bytes(8, "little", signed=True) + data)
        return hashed.digest()
