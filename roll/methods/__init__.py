"""Algorithms: what each minimises, what it asks of other models, and how samples become credit.

``base`` has what travels to workers; ``sft``, ``preferences``, ``reward_model`` and ``distill`` learn from given rows;
``policy`` (with ``losses``), ``episodes`` and ``opd`` from samples of the policy. ``policy_plan``, ``opd_keys`` and
``teachers`` follow from a configuration, without torch.
"""
