"""Checkpoints in other layouts, made Hugging Face directories."""
