"""Drafters of all kinds; only ModelDrafter is in engine/generate.py. Their options are in draftlab/drafters/."""
