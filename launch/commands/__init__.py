"""One module for each command that looks at runs; ``launch.cli`` puts them together."""
