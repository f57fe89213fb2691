"""What several tests need: small models and files, fake servers, enumerations, and commands that are run in process."""
