"""Heads, which draft from the states of the target's layers. Each kind has a folder; two modules are shared."""
