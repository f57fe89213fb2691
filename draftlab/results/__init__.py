"""Scores on disk and everything shown from them."""
