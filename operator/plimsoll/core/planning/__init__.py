"""Planning: replicas, arrangement and engine settings for an SLO and a workload, before anything runs.

Problem: how many GPUs, aggregated or disaggregated prefill and decode, and which engine limits must be known before
there is a cluster to measure. Idea: the model that sizes a running fleet (`tier_model`, `sizing`, `expected_latency`)
is applied to described machines (`machine_model`): by a measured profile, or by the roofline of a model's shape. This
package adds rules for the choice of an arrangement (`arrangement`) and of settings (`engine_settings`); `fleet_plan`
combines them.
"""
