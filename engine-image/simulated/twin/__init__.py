"""vLLM's own server, engine core and scheduler, with steps that sleep for as long as a profile's accelerator takes.

Problem: the simulated engine composes steps by a rule that was written after vLLM's, and a rule that was misread looks
like a law of the machine.
Idea: an executor for vLLM that has no model. What the scheduler puts into a step is counted (`step_work`). The
simulated engine's `StepTiming` says how long that takes; the executor sleeps and hands back words of no meaning. All
else is vLLM: HTTP, the tokenizer, the queues between its processes, chunked prefill, two steps in flight, KV blocks.

    vllm serve MODEL --load-format dummy --distributed-executor-backend simulated.twin.executor.TwinExecutor \
      --additional-config '{"twin": {"profile": "h200-8b", "time_scale": 8}}'

with `engine-image` and `operator` on PYTHONPATH. It takes vLLM's build for the CPU, a folder with config.json and a
tokenizer, and no weights. `python -m bench.twin` runs it and compares; it proves the schedule, not the time of a step.
"""
