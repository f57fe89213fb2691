"""Command lines, typed in this process."""

from typer.testing import CliRunner, Result

from draftlab.cli import app


def call(command: str, *arguments: object, code: int = 0) -> Result:
    """Type the words of a command, then arguments that may have spaces, and check the exit code."""
    result = CliRunner().invoke(app, [*command.split(), *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result
