"""Scores, the files that they are stored in, and the tables, plots and reports made from them."""
