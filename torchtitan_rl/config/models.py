"""Folders of models that this package makes itself."""

SMOLLM2_FOLDER = "outputs/models/SmolLM2-135M-Instruct"
"""SmolLM2-135M-Instruct; models/makers/smollm2.py makes it when a recipe first needs it."""
