"""Drafters that need no trained head: options, drafter, acceptance and cost of each kind in one module."""
