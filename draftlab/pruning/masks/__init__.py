"""Pruning with learned masks (Sheared LLaMA, CoFi)."""
