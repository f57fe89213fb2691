"""Scores on disk, and the tables, plots and reports made from scores."""
