"""Drafters other than a plain draft model."""
