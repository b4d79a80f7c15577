"""Plimsoll's sizing on a simulator that others wrote: the replay that comes with NVIDIA Dynamo."""
