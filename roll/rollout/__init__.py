"""Rollouts: from a prompt or a task to a scored group of samples. Who waits for whom, on one event loop:

    scheduler    GroupFlow           EngineClient                   GenerationWorker
    collect() -> start(n)
      |            coroutine of a group (a rollout loop, or an episode's agent)
      |              |
      |              | submit()         queue -> router -> account     advance() of an engine:
      |              |----------------> [.......] ----------------->   one turn, at least a token
      |              | await            one turn in flight a rank <--  of each of its samples
      |              | <--- finished group, or part of it as the turns go ---'
      |              |
      |              |                RewardClient                   RewardWorker
      |              | score() ------> by domain, in batches -----> compute_rewards()
      |              | <--------------- a result a sample ------------'
      |              |
      |              | filter: accepted or rejected
      |  take()      v
      | <--------- Progress
      v
    rows of a step

- A coroutine waits for its own samples and scores only; a slow reward holds up no other group.
- An engine has one turn in flight. What arrives meanwhile joins its next turn.
- ``pause()`` waits for the turns in flight, so that weights are exchanged between tokens; samples stay where they are.
- Synchronous runs start what a step needs and wait for it; asynchronous ones keep up to
  ``(1 + async_generation_ratio)`` steps of groups begun or waiting, and the trainer waits only if none is ready.
- A lost engine's requests go to the others; a dead reward worker's samples are scored again by its successor.

A prompt is an episode of one call:

- ``RolloutLoop.answer(prompt, context)`` is a coroutine that makes a group, and what a user writes. ``SingleTurn`` asks
  once for all samples; ``EpisodeLoop`` runs ``Agent.run(task, model, episode)`` for each member of a group.
- ``RolloutContext``: a group in the making, with its number, of which its seeds are made, and the engines and rewards.
- ``Calls``: the requests of a loop or an agent. A checkpoint has those of every group in flight; a resumed run begins
  the coroutines again and answers them from there.
- ``GroupFlow``: the groups in flight. ``collected`` begins those of a step, ``AsyncScheduler`` does so ahead of it.
- ``Group``: trajectories that share a baseline, the result. A ``Sample`` is a response (views of a request's arrays,
  no Python object a token), an ``Episode`` a tree of calls; ``GroupCodec`` reads both from checkpoints.
- ``Row``: a row of a batch is responses one behind the other, each trained or context: a sample, or a branch of calls.
- ``roll.pipelines.engine_rollout.EngineRollout`` is the rollout phase of a step, with a ``RolloutSource`` for what a
  pipeline adds.
"""
