"""Scheduler, paged KV cache, layers, models, sampler and engine."""
