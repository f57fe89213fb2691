"""The settings of each command: its options, and the rules between them. Torch is not loaded."""
