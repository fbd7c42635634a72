"""Training loops of one's own: the models of a configuration, called from Python.

    with roll.Workers("tiny/rlvr_config") as workers:
        policy, engine = roll.TrainClient(workers, "actor_train"), roll.EngineClient(workers)
        policy.send_weights(engine).result()
        groups = engine.sample(prompts, SamplingParams(max_new_tokens=36), num_samples=8).result()
        metrics = policy.step(batch_of(groups), loss).result()

:class:`Workers` starts Ray and the models' processes as a run does, on the devices that the configuration names; the
clients call the same workers by the same functions. A call begins at once and returns a :class:`Future`. Calls of one
role are done in their order; roles without a device in common work at the same time, those that share devices take
turns.
"""
