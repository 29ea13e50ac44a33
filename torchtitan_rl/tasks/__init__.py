"""What a task is, the built-in tasks, and their answers and rewards."""
