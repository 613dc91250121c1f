"""The command line: `peftlib COMMAND [flags]`."""
