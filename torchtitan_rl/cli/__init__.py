"""The command `torchtitan-rl` and its subcommands; each imports only what it needs."""
