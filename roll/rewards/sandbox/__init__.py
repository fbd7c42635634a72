"""Runs programs that a model has written, confined, and judges them by cases.

A reward worker starts one zygote (:mod:`~roll.rewards.sandbox.zygote`) and requests processes from it.  Each is forked
ready to run, gives up what the host lets it give up (:mod:`~roll.rewards.sandbox.confinement`), and runs one program.
Tests run in one process and the response in another (:mod:`~roll.rewards.sandbox.remote`): the response never reports
its own verdict.
"""
