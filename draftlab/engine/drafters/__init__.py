"""Drafting by every kind of drafter but a plain draft model (engine/generate.py). Their options are in drafters/."""
