"""Typed settings of each command: one frozen class, from the command line or a file to the library. No torch."""
