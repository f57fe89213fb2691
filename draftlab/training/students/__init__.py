"""The kinds of students that distill trains: a module each, under the name of the kind, without torch."""

from draftlab.config.kinds import STUDENTS, StudentSpec, parse_student, student

__all__ = ["STUDENTS", "StudentSpec", "parse_student", "student"]
