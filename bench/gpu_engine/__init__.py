"""The content of the engine image on a machine with a GPU: what passes, what fails, and how long each part takes."""
