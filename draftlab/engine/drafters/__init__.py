"""Drafting by all kinds of drafters except draft models, which are in engine/generate.py. Options are in drafters/."""
