"""The kinds of students that distill trains, one module per kind without torch at import."""

from draftlab.config.kinds import STUDENTS, StudentSpec, parse_student, student

__all__ = ["STUDENTS", "StudentSpec", "parse_student", "student"]
