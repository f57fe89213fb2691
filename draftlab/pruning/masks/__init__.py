"""Learned pruning masks (Sheared LLaMA, CoFi)."""
