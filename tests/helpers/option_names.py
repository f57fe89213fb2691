"""Names of options that every command has."""

COMMON = {
    "--help",
    "--help-all",
    "--config",
    "--json",
    "--dry-run",
    "--force",
    "--version",
    "--install-completion",
}
