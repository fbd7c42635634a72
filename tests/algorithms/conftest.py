from hypothesis import settings

# The first example of a test pays for lazy imports inside torch, and shared machines stall now and then.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
