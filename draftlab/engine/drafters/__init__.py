"""How drafters draft, other than a plain draft model (engine/generate.py). Their options are in drafters/."""
