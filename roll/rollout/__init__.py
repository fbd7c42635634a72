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

Prompts and episodes share everything but the coroutine and the arrays of a group:

- ``Drawn``: a prompt or task with the number of its draw, from which its seeds are made.
- ``GroupFlow``: a coroutine a group. ``PromptFlow`` awaits ``RolloutLoop.answer(prompt, context)``, ``EpisodeFlow``
  ``Agent.run(task, model, episode)`` for each member; both are what a user writes.
- ``Group``: the result, with its number, its failure and its mean score. ``SampleGroup`` keeps flat arrays over all
  samples of a prompt (a plain prompt costs no Python object a token), ``EpisodeGroup`` each episode's tree of calls.
- ``GroupCodec``: items and groups as plain values for checkpoints, and the versions of the weights in a group.
- ``collected`` and ``AsyncScheduler``: a step's groups, begun for it or ahead of it. They are all that
  ``roll.pipelines.engine_rollout.EngineRollout`` needs, with a ``RolloutSource`` for what a pipeline adds.
"""
