"""The typed settings of commands. The command line or a file fills the frozen class of a command. No torch."""
