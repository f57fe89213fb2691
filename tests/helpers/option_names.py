"""Names of options that every command has."""

COMMON = {"--help", "--config", "--json", "--dry-run", "--force", "--version"}
