"""From scheduled tokens to sampled ones: ModelRunner, Sampler, LLMEngine."""
