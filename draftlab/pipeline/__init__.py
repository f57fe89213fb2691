"""From a target to a served draft: a plan of recipe steps within a time, and the verdict on what they measured."""
