"""From episodes to packed rows of tokens, assigned to the trainer's ranks."""
