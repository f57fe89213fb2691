"""The typed settings of commands: one frozen class for each, built from the command line or a file. No torch."""
