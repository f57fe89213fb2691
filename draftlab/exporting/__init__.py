"""A finished draft in the form that a runtime loads, with its script and card, scored again in that runtime."""
