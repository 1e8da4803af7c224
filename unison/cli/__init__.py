"""The ``unison`` command. Each subcommand is imported only when it is called."""
