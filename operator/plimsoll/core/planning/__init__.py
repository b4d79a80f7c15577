"""What to run before anything runs: replicas, arrangement and engine settings for a promise and a workload.

Problem: how many GPUs, prefill and decode together or apart, and with which limits, is asked before there is a cluster
to measure. Idea: the very laws that size a running fleet (`knee`, `sizing`, `latency`) are asked about machines that
are described (`machine`): by a measured profile, or by the roofline of a model's shape. What is new here are rules for
choosing between arrangements (`arrange`) and for settings (`settings`); `plan` puts them together.
"""
