"""Plimsoll's sizing in another project's simulator: the replay of NVIDIA Dynamo."""
