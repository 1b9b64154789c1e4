"""The Llama architecture in PyTorch, as small as training needs it; weights have Hugging Face's names and order."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from minserve.model.config import ModelConfig


class Network(nn.Module):
    """token ids (B, T) -> logits (B, T, V). Its state_dict is what minserve's transformer computes with."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Stack(config)
        length, half = config.max_position_embeddings, config.head_dim // 2
        inverse = config.rope_theta ** -(torch.arange(half) / half)  # (d/2,)
        angles = torch.outer(torch.arange(length).float(), inverse)  # (T, d/2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=self._scale(name, weight))

    def _scale(self, name: str, weight: torch.Tensor) -> float:
        """Standard deviation of a fresh weight; what is added to the residual stream starts smaller."""
        if "embed_tokens" in name:
            return 0.02
        into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
        depth = 2 * self.config.num_hidden_layers if into_stream else 1
        return float(0.5 * weight.shape[1] ** -0.5 * depth**-0.5)

    def forward(self, token_ids: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
        """documents (B, T): tokens see only earlier ones of their own document; None: all of a row is one."""
        length = token_ids.shape[1]
        mask = None
        if documents is not None:
            causal = torch.ones(length, length, dtype=torch.bool).tril()
            mask = (documents[:, None, :, None] == documents[:, None, None, :]) & causal  # (B, 1, T, T)
        x = self.model.embed_tokens(token_ids)  # (B, T, H)
        for layer in self.model.layers:
            x = layer(x, self.cos[:length], self.sin[:length], mask)  # (B, T, H)
        return functional.linear(self.model.norm(x), self.model.embed_tokens.weight)  # (B, T, V)


class _Stack(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = _MLP(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)  # (B, T, H)
        return x + self.mlp(self.post_attention_layernorm(x))  # (B, T, H)


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            projection(x).view(rows, length, -1, self.size).transpose(1, 2)  # (B, heads, T, d)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # (B, heads, T, d)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None
        )  # (B, heads, T, d)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class _MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (arXiv 2104.09864, section 3.4.2), the two halves of a head being the pairs."""
    left, right = x.chunk(2, -1)  # (B, heads, T, d/2) each
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)
