"""Generator, trainer, reference, grader and environment, each in processes of its own."""
