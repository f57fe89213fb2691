"""Conversion of checkpoints in other layouts to Hugging Face directories."""
