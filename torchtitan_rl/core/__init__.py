"""Types, metrics, plugins and errors that every other package uses."""
