"""A finished draft in the form that a runtime loads, with what it takes to serve it, scored again where it runs."""
