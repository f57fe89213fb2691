"""The kinds of students that `draftlab distill` trains, one module for each. The modules do not import torch."""

from draftlab.config.kinds import STUDENTS, StudentSpec, parse_student, student

__all__ = ["STUDENTS", "StudentSpec", "parse_student", "student"]
