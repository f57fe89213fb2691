"""How settings are declared, checked, and filled from the command line or a file. No torch."""
