"""The subcommands of `samestep`: one file each, with `DESCRIPTION`, `add_arguments(parser)` and `run(arguments)`."""
