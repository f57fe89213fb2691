"""Students that start from a draft model, a module for each kind, and the base class of all students."""
