"""What a command writes and remembers: whole outputs, their records, and the defaults of a workspace."""
